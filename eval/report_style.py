"""The page's style sheet: light, dark and print; a narrow phone and a wide screen. Knows class names only."""

from __future__ import annotations

STYLE = """
:root{--paper:#fcfbf8;--card:#fff;--ink:#1c1d20;--soft:#5d6068;--rule:#e4e1d8;
--s1:#0b6b63;--s2:#b3590f;--s3:#4c5fb8;--s4:#8c3f7c;--s5:#6d6a1e;--s6:#a32c4e;--good:#2c6e3f;--bad:#a3342c}
@media (prefers-color-scheme:dark){:root{--paper:#15171a;--card:#1c1f23;--ink:#e9e8e4;--soft:#9fa3ab;
--rule:#30343a;--s1:#55c7b8;--s2:#eaa15c;--s3:#9aa8f0;--s4:#dd97cc;--s5:#c9c46b;--s6:#f08aa5;--good:#7fcf96;--bad:#f09087}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;overflow-wrap:anywhere;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:44px 32px 72px}
h1,h2{font-family:Charter,"Bitstream Charter","Iowan Old Style",Georgia,"Times New Roman",serif;
font-weight:600}
h1{font-size:clamp(1.42rem,1.1rem + 1.5vw,2.15rem);line-height:1.28;letter-spacing:-.01em;margin:.5em 0 .8em;
max-width:32em;text-wrap:pretty}
h2{font-size:1.4rem;margin:3.2rem 0 .8rem;padding-top:1.2rem;border-top:1px solid var(--rule)}
h3{font-size:1rem;font-weight:650;margin:0 0 .15rem}
p{margin:0 0 1em}
.over{color:var(--soft);font-size:.86rem;margin:0}
.lead{max-width:44em}
.note{color:var(--soft);font-size:.9rem;max-width:52em}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(210px,1fr));gap:14px;margin:1.8rem 0 1.5rem}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:16px 18px 14px}
.tiles b{display:block;font:600 2.05rem/1.1 Charter,"Bitstream Charter","Iowan Old Style",Georgia,serif;
color:var(--s1);font-variant-numeric:lining-nums}
.tiles span{display:block;margin-top:.35rem;line-height:1.35}
.tiles small{display:block;margin-top:.35rem;color:var(--soft);font-size:.82rem;line-height:1.4}
.findings{padding-left:1.15em;max-width:58em;margin:0}
.findings li{margin:.32em 0}
.figures{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:18px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:10px;
padding:16px 16px 12px;display:grid;grid-row:span 4;grid-template-rows:subgrid;row-gap:0}
figure p{color:var(--soft);font-size:.87rem;line-height:1.42;margin:0 0 .5rem}
figure svg{display:block;width:100%;max-width:440px;height:auto;margin:0 auto}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 8px;padding:0;font-size:.83rem}
.legend i{font-style:normal;margin-right:6px}
.tokens{gap:6px 22px;margin-bottom:1rem;font-size:.88rem}
.sample{margin:0 0 1.6rem;max-width:60em}.sample .over{margin:0 0 .5rem}
.prompt{white-space:pre-wrap;color:var(--soft);font-size:.88rem;line-height:1.45;border-left:3px solid var(--rule);
padding:.1rem 0 .1rem .8rem;margin:0 0 .6rem}
.text{white-space:pre-wrap;background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px;
margin:0;line-height:1.9;font-size:.95rem}
mark,.text b,.tokens b,del{border-radius:4px;padding:1px 2px;margin:0 1px;box-decoration-break:clone;
-webkit-box-decoration-break:clone}
mark{color:inherit;background:color-mix(in srgb,var(--s1) 22%,transparent)}
.text b,.tokens b{font-weight:600;box-shadow:inset 0 0 0 1px var(--soft)}
del{color:var(--bad);font-size:.84em}
.tiles .off b{color:var(--bad)}
.s1{color:var(--s1)}.s2{color:var(--s2)}.s3{color:var(--s3)}.s4{color:var(--s4)}
.s5{color:var(--s5)}.s6{color:var(--s6)}.soft{color:var(--soft)}
svg{stroke-linejoin:round}
svg text{font-family:inherit!important;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto;margin:0 0 1.4rem}.figures+.scroll{margin-top:1.6rem}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:13.5px;line-height:20px;
font-variant-numeric:tabular-nums lining-nums}
caption{text-align:left;font-weight:650;padding:.3rem 0 .45rem;position:sticky;left:0}
th{color:var(--soft);font-weight:500;text-align:right;border-bottom:1px solid var(--rule)}
th,td{padding:5px 0 5px 11px;white-space:nowrap}
td{text-align:right;border-bottom:1px solid var(--rule)}
th:first-child,td:first-child{text-align:left;padding-left:0;padding-right:8px;position:sticky;left:0;
background:var(--paper);max-width:15em;overflow:hidden;text-overflow:ellipsis}
.all td{font-weight:600}.part td{color:var(--soft)}.part td:first-child{padding-left:14px}
.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere;vertical-align:top}
.facts td:first-child{color:var(--soft);width:15em;min-width:8em;position:static}
.good b{color:var(--good)}
.near b{color:var(--s2)}.bad b{color:var(--bad)}
dl{display:grid;grid-template-columns:minmax(11em,max-content) 1fr;gap:.5rem 1.6rem;margin:0;font-size:.92rem}
dt{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.84rem;padding-top:.12rem}
dd{margin:0;max-width:46em}
pre{overflow-x:auto;font-size:.8rem;line-height:1.45;background:var(--card);border:1px solid var(--rule);
border-radius:8px;padding:14px}
summary{cursor:pointer}
@media (max-width:1020px){.figures{grid-template-columns:repeat(2,minmax(0,1fr))}
.tiles{grid-template-columns:1fr 1fr}}
@media (max-width:680px){main{padding:26px 16px 48px}.figures{grid-template-columns:minmax(0,1fr)}
.tiles{gap:10px}.tiles div{padding:12px 13px}.tiles b{font-size:1.65rem}
.tiles span{font-size:.92rem}dl{grid-template-columns:1fr;gap:.1rem}dd{margin-bottom:.75rem}
.facts td:first-child{width:42%}table:not(.facts) td:first-child{max-width:9.5em}}
@media print{:root{--paper:#fff;--card:#fff;--ink:#000;--soft:#444;--rule:#ccc;
--s1:#0b6b63;--s2:#b3590f;--s3:#4c5fb8;--s4:#8c3f7c;--s5:#6d6a1e;--s6:#a32c4e;--good:#2c6e3f;--bad:#a3342c}
body{font-size:10.5pt}main{max-width:none;padding:0}h2{margin-top:1.6rem;break-after:avoid}
section:has(.figures){break-before:page}
figure,.tiles div,table{break-inside:avoid}.facts{break-inside:auto}
.tiles{grid-template-columns:repeat(4,1fr)}.figures{grid-template-columns:repeat(2,minmax(0,1fr));gap:10px}
figure{padding:10px 10px 6px}figure svg{max-height:19cm}@page{margin:14mm}
.scroll{overflow:visible}table{font-size:7.4pt}th,td{padding-left:6px;white-space:normal;overflow-wrap:normal}
mark,.text b{print-color-adjust:exact;-webkit-print-color-adjust:exact}.sample{break-inside:avoid}
details::details-content{content-visibility:visible;block-size:auto}pre{white-space:pre-wrap}}
"""
