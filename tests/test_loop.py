"""The training loop: what the numbers of a step are, and that they do not depend on how it was divided."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.artifact import UserError
from tests.training_toy import ToySource, metrics_of, toy_head, toy_settings, toy_train, weights_of
from training.devices import open_accelerator
from training.features import BatchPlan, pack, unpack
from training.optim import OptimSettings, build_optimizer, build_scheduler, parameter_groups
from training.step import seed_of
from training.tracking import LineDisplay

# Sums in fp32 over a few hundred terms in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def test_the_loop_does_what_a_plain_loop_does(tmp_path: Path) -> None:
    """A naive twin: mean loss over all supervised positions of a global batch, AdamW, clip, cosine."""
    settings = toy_settings(epochs=2)
    head, twin = toy_head(), toy_head()
    toy_train(tmp_path, head, epochs=2)

    source = ToySource()
    plan = BatchPlan(source.documents, settings.global_batch_tokens, settings.seed, settings.max_length)
    batches = plan.epoch(0) + plan.epoch(1)
    optimizer = build_optimizer(twin, settings.optim)
    schedule = build_scheduler(optimizer, settings.optim, len(batches))
    losses = []
    for step, batch in enumerate(batches):
        features = plan.load(source, batch)
        assert features is not None
        torch.manual_seed(seed_of(settings.seed, step, 0))
        sums = twin(replace(features, last_TD=features.last_TD.float()))
        mean = sums.loss / sums.count
        mean.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(mean.item())

    logged = [line["loss"] for line in metrics_of(tmp_path)]
    assert logged == pytest.approx(losses, rel=1e-5)
    for name, tensor in weights_of(head).items():
        torch.testing.assert_close(tensor, twin.state_dict()[name], **CLOSE)


def test_the_same_seed_gives_the_same_bits_whatever_the_reading_and_saving(tmp_path: Path) -> None:
    first, second, third = toy_head(), toy_head(), toy_head()
    toy_train(tmp_path / "1", first)
    toy_train(tmp_path / "2", second, read_ahead=0, save_every=0, log_every=4)
    toy_train(tmp_path / "3", third, seed=1)
    for name, tensor in weights_of(first).items():
        assert torch.equal(tensor, weights_of(second)[name])
    assert not torch.equal(first.mix.weight, third.mix.weight)


def test_one_micro_batch_of_four_equals_four_of_one(tmp_path: Path) -> None:
    """Without noise the division into micro-batches is not seen; 64 leaves most of them empty."""
    heads = {}
    for accumulation in (1, 4, 64):
        heads[accumulation] = toy_head(noise=0.0)
        toy_train(tmp_path / str(accumulation), heads[accumulation], accumulation=accumulation)
    for accumulation in (4, 64):
        for one, other in zip(metrics_of(tmp_path / "1"), metrics_of(tmp_path / str(accumulation)), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert one["acceptance/1"] == other["acceptance/1"] and one["tokens"] == other["tokens"]
        for name, tensor in weights_of(heads[1]).items():
            torch.testing.assert_close(tensor, weights_of(heads[accumulation])[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ({"epochs": 2}, 14),
        ({"epochs": 9, "max_steps": 5}, 5),
        ({"epochs": 1, "max_steps": 50}, 7),
        ({"max_steps": 7}, 7),
    ],
)
def test_the_smaller_of_epochs_and_max_steps_ends_the_run(tmp_path: Path, asked: dict[str, int], steps: int) -> None:
    result = toy_train(tmp_path, **asked)
    assert result.steps == steps == len(metrics_of(tmp_path))
    assert result.epochs == pytest.approx(steps / 7)


def test_numbers_of_a_run(tmp_path: Path) -> None:
    result = toy_train(tmp_path, epochs=20, log_every=7)
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(7, 141, 7))
    assert result.loss == lines[-1]["loss"] < lines[0]["loss"]
    assert result.metrics["acceptance"] == [lines[-1]["acceptance/1"], lines[-1]["acceptance/2"]]
    assert result.metrics["acceptance"][0] > 0.9, "the toy task can be learnt"
    assert result.tokens == 20 * BatchPlan(ToySource().documents, 128, 0, 32).tokens
    assert result.tokens_per_second > 0 and result.skipped_steps == 0 and result.truncated_documents == 7
    assert lines[-1]["lr"] == 0


def test_a_log_line_weighs_positions_not_steps(tmp_path: Path) -> None:
    toy_train(tmp_path / "each", noise_free := toy_head(noise=0.0), max_steps=7, save_every=0)
    toy_train(tmp_path / "once", toy_head(noise=0.0), max_steps=7, log_every=7, save_every=0)
    source = ToySource()
    plan = BatchPlan(source.documents, 128, 0, 32)
    counts = [float(noise_free(_float(plan, source, batch)).count) for batch in plan.epoch(0)]
    each = [line["loss"] for line in metrics_of(tmp_path / "each")]
    mean = sum(a * b for a, b in zip(each, counts, strict=True)) / sum(counts)
    assert metrics_of(tmp_path / "once")[0]["loss"] == pytest.approx(mean)


def _float(plan: BatchPlan, source: ToySource, batch: Any) -> Any:
    features = plan.load(source, batch)
    assert features is not None
    return replace(features, last_TD=features.last_TD.float())


def test_a_batch_without_supervision_is_skipped_and_counted(tmp_path: Path) -> None:
    source = ToySource()
    batches = BatchPlan(source.documents, 128, 0, 32).epoch(0)
    source.unsupervised = {ref.id for ref in batches[0]} | {ref.id for ref in batches[3]}
    head = toy_head()
    before = weights_of(head)
    result = toy_train(tmp_path, head, source=source, epochs=1, max_steps=1)
    assert result.skipped_steps == 1 and math.isnan(result.loss)
    for name, tensor in before.items():
        assert torch.equal(tensor, weights_of(head)[name])
    result = toy_train(tmp_path / "all", toy_head(), source=source, epochs=1)
    assert (result.steps, result.skipped_steps) == (7, 2)
    assert [("loss" in line) for line in metrics_of(tmp_path / "all")] == [
        False,
        True,
        True,
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run_and_keeps_the_weights(tmp_path: Path, what: str) -> None:
    source = ToySource()
    third = BatchPlan(source.documents, 128, 0, 32).epoch(0)[2]
    kept = toy_head()
    toy_train(tmp_path / "good", kept, max_steps=2, optim=OptimSettings(schedule="constant", warmup_share=0))
    head = toy_head()
    if what == "loss":
        source.poisoned = {third[0].id}
    else:
        calls = iter(range(9))
        head.out[0].bias.register_hook(lambda grad: grad if next(calls) != 2 else grad * math.inf)
    with pytest.raises(UserError) as caught:
        toy_train(tmp_path / "bad", head, source=source, optim=OptimSettings(schedule="constant", warmup_share=0))
    message = str(caught.value)
    assert message.startswith("Step 3: ") and what in message and third[0].id in message
    assert (
        "step-00000002" in message and "optim.lr" in message and (tmp_path / "bad/checkpoints/step-00000002").is_dir()
    )
    for name, tensor in weights_of(kept).items():
        assert torch.equal(tensor, weights_of(head)[name])


def test_bf16_computes_in_bf16_and_keeps_fp32_weights(tmp_path: Path) -> None:
    exact, rounded = toy_head(noise=0.0), toy_head(noise=0.0).to(torch.bfloat16)
    toy_train(tmp_path / "no", exact, epochs=20, log_every=7)
    toy_train(tmp_path / "bf16", rounded, epochs=20, log_every=7, mixed_precision="bf16")
    assert all(parameter.dtype == torch.float32 for parameter in rounded.parameters())
    one, other = metrics_of(tmp_path / "no"), metrics_of(tmp_path / "bf16")
    assert one[-1]["loss"] != other[-1]["loss"]
    assert one[-1]["loss"] == pytest.approx(other[-1]["loss"], rel=0.05)


def test_on_eval_is_called_in_eval_mode_and_changes_nothing(tmp_path: Path) -> None:
    head, plain = toy_head().eval(), toy_head()  # in eval mode, as heads are loaded
    calls: list[tuple[int, bool, bool]] = []
    modes: set[bool] = set()
    head.mix.register_forward_pre_hook(lambda module, _: modes.add(module.training))

    def on_eval(step: int, state: Any) -> dict[str, float]:
        torch.rand(3)
        calls.append((step, head.training, torch.is_grad_enabled()))
        return {"alpha": 0.5}

    toy_train(tmp_path / "a", head, epochs=1, eval_every=3, on_eval=on_eval)
    toy_train(tmp_path / "b", plain, epochs=1)
    assert calls == [(3, False, False), (6, False, False)] and modes == {True} and head.training
    assert [line["step"] for line in metrics_of(tmp_path / "a") if "eval/alpha" in line] == [3, 6]
    assert torch.equal(head.mix.weight, plain.mix.weight)


def test_a_head_with_nothing_to_recompute_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gradient_checkpointing=true: a ToyHead keeps nothing"):
        toy_train(tmp_path, gradient_checkpointing=True)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed steps by itself"),
        ({"ACCELERATE_USE_FSDP": "true"}, "Only FSDP2 is supported"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "conf/accelerate/fsdp2.yaml"),
    ],
)
def test_what_a_launcher_may_not_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], told: str
) -> None:
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=told):
        toy_train(tmp_path)


@pytest.mark.parametrize(("where", "cpu"), [("cpu", True), ("mps", False)])
def test_it_trains_where_the_head_is(monkeypatch: pytest.MonkeyPatch, where: str, cpu: bool) -> None:
    """On a machine with an accelerator too, which accelerate would take by itself."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr("training.devices.Accelerator", lambda **how: asked.append(how["cpu"]))
    open_accelerator(torch.device(where))
    assert asked == [cpu]


def test_groups_spare_norms_and_biases_and_follow_prefixes() -> None:
    head = toy_head()
    settings = OptimSettings(lr=0.1, weight_decay=0.2, lr_multipliers={"out": 0.5, "out.1": 2.0})
    names = {parameter: name for name, parameter in head.named_parameters()}
    got = {
        names[parameter]: (group["lr"], group["weight_decay"])
        for group in parameter_groups(head, settings)
        for parameter in group["params"]  # type: ignore[attr-defined]
    }
    assert got["mix.weight"] == (0.1, 0.2) and got["mix.bias"] == (0.1, 0.0)
    assert got["norm.weight"] == (0.1, 0.0)
    assert got["out.0.weight"] == (0.05, 0.2) and got["out.1.bias"] == (0.2, 0.0)
    with pytest.raises(UserError, match="lr_multipliers names 'head.'.*begin with: mix, norm, out"):
        parameter_groups(head, OptimSettings(lr_multipliers={"head.": 2.0}))


def test_muon_moves_the_matrices_inside_and_adamw_the_rest() -> None:
    """Against two optimizers of torch side by side, over a few steps and a reload."""
    settings = OptimSettings(name="muon", lr=0.02, weight_decay=0.1, momentum=0.9, lr_multipliers={"out": 0.5})
    head, twin = toy_head(), toy_head()
    ours = build_optimizer(head, settings)
    rest = [parameter for name, parameter in twin.named_parameters() if name != "mix.weight"]
    decayed = [parameter for parameter in rest if parameter.ndim == 2]
    others = [
        torch.optim.Muon([twin.mix.weight], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(decayed, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95)),
        torch.optim.AdamW([*twin.norm.parameters(), twin.mix.bias], lr=0.02, weight_decay=0, betas=(0.9, 0.95)),
        torch.optim.AdamW([out.bias for out in twin.out], lr=0.01, weight_decay=0, betas=(0.9, 0.95)),
    ]
    draw = torch.Generator().manual_seed(1)
    for step in range(4):
        for parameter, same in zip(head.parameters(), twin.parameters(), strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            same.grad = parameter.grad.clone()
        for optimizer in (ours, *others):
            optimizer.step()
        if step == 1:  # as after a resume
            state = ours.state_dict()
            ours = build_optimizer(head, settings)
            ours.load_state_dict(state)
    for name, tensor in weights_of(head).items():
        torch.testing.assert_close(tensor, weights_of(twin)[name], rtol=1e-5, atol=1e-7)


def test_muon_follows_the_schedule_and_resumes(tmp_path: Path) -> None:
    settings = OptimSettings(name="muon", lr=0.02)
    head = toy_head()
    optimizer = build_optimizer(head, settings)
    schedule = build_scheduler(optimizer, settings, 100)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0] * len(optimizer.param_groups)
    before = weights_of(head)
    for parameter in head.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(tensor, weights_of(head)[name]) for name, tensor in before.items()), "the rate is still 0"
    schedule.step()
    optimizer.step()
    assert not torch.equal(before["mix.weight"], head.mix.weight)


def naive_sequence_mean(head: Any, plan: BatchPlan, source: ToySource, batch: Any) -> float:
    """Each document's mean over its own supervised positions, then the mean of those."""
    means = []
    for ref in batch:
        sums = head(_float(plan, source, (ref,)))
        means.append((sums.loss / sums.count).item())
    return sum(means) / len(means)


def test_a_mean_over_sequences_counts_each_document_once(tmp_path: Path) -> None:
    """The same under accumulation; and it is another number than the mean over tokens."""
    source, head = ToySource(), toy_head(noise=0.0)
    plan = BatchPlan(source.documents, 128, 0, 32)
    expected = naive_sequence_mean(head, plan, source, plan.epoch(0)[0])
    heads = {}
    for accumulation in (1, 4):
        heads[accumulation] = toy_head(noise=0.0)
        toy_train(tmp_path / str(accumulation), heads[accumulation], accumulation=accumulation, mean="sequence")
    toy_train(tmp_path / "token", toy_head(noise=0.0), max_steps=1)
    first = metrics_of(tmp_path / "1")[0]["loss"]
    assert first == pytest.approx(expected, rel=1e-5)
    assert first != pytest.approx(metrics_of(tmp_path / "token")[0]["loss"], rel=1e-3)
    for one, other in zip(metrics_of(tmp_path / "1"), metrics_of(tmp_path / "4"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["acceptance/1"] == other["acceptance/1"]
    for name, tensor in weights_of(heads[1]).items():
        torch.testing.assert_close(tensor, weights_of(heads[4])[name], rtol=1e-3, atol=1e-5)


def test_packed_documents_give_the_loss_and_gradient_of_single_ones() -> None:
    source, head = ToySource(), toy_head(noise=0.0)
    plan = BatchPlan(source.documents, 128, 0, 32)
    batch = plan.epoch(0)[0]
    packed = _float(plan, source, batch)
    gradients = []
    for parts in ([packed], unpack(packed)):
        head.zero_grad()
        sums = [head(part) for part in parts]
        total = torch.stack([one.loss for one in sums]).sum()
        total.backward()
        gradients.append([total.item(), *(parameter.grad.clone() for parameter in head.parameters())])
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-5)
    for one, other in zip(gradients[0][1:], gradients[1][1:], strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize(("name", "middle", "end"), [("cosine", 0.5, 0.0), ("linear", 0.5, 0.0), ("constant", 1, 1)])
def test_schedules_warm_up_and_end(name: str, middle: float, end: float) -> None:
    optimizer = build_optimizer(toy_head(), OptimSettings(lr=1.0))
    schedule = build_scheduler(optimizer, OptimSettings(lr=1.0, schedule=name, warmup_share=0.1), 100)
    rates = []
    for _ in range(101):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == 0 and rates[5] == 0.5 and rates[10] == 1
    assert rates[55] == pytest.approx(middle) and rates[100] == pytest.approx(end)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision=fp16"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"accumulation": 0}, "accumulation=0"),
        ({"eval_every": 0}, "eval_every=0"),
        ({"mean": "batch"}, "train.mean=batch is unknown; choose one of token, sequence"),
        ({"eval_every": 2, "patience": 0}, "patience=0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        toy_settings(**given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "sgd"}, "optim.name=sgd"),
        ({"schedule": "step"}, "optim.schedule=step"),
        ({"lr": math.nan}, "optim.lr=nan"),
        ({"momentum": 0.9}, "choose optim=muon"),
        ({"name": "muon", "momentum": 1.0}, "optim.momentum=1.0"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "exclude each other"),
    ],
)
def test_optimizer_settings_that_cannot_be_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        OptimSettings(**given)


def test_lines_instead_of_a_bar_where_there_is_no_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    toy_train(tmp_path, max_steps=7, log_every=3, stream=stream)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["3/7", "6/7", "7/7"]
    assert all("loss" in line and "acceptance" in line and "tokens/s" in line and "left" in line for line in lines)


def test_time_left_counts_from_where_the_run_began() -> None:
    stream = io.StringIO()
    display = LineDisplay(stream, total=100, start=90, every=1)
    display.update(91, {"loss": 1.0})
    assert stream.getvalue() == "train 91/100  loss 1.0000  0:00:00 left\n"


def test_packing_nothing_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        pack([])
