"""Bytes of the fullest rank of a published run."""

from __future__ import annotations

from enum import StrEnum

from autopar.schedules import Kind
from cost_models.memory import COMMUNICATOR_BYTES, CONTEXT_BYTES, FRAGMENTATION_MOST
from cost_models.pipeline import one_f_one_b_live
from tests.benchmarks.predict import Unit, pending_share, saved_bytes, table, unit_of
from tests.benchmarks.run import Run


def peak_bytes(run: Run) -> float:
    """Bytes that the allocator has handed out at the peak of the fullest stage."""
    return max(stage_bytes(run, stage) for stage in range(run.pp))


class Fit(StrEnum):
    """Whether a run is predicted to fit.

    What is sure to fit has room for the context, communicators and the worst fragmentation that is
    published. What is above the device's memory with the context alone is sure not to: an allocator
    that runs short gives back all that it does not use, in vain. What lies between depends on how
    fragmented memory is.
    """

    SURE = "sure"
    TIGHT = "tight"
    NOT = "not"


def fit(run: Run) -> Fit:
    """Whether it is predicted to fit."""
    peak, room = peak_bytes(run), run.cluster.device(0).memory_bytes - CONTEXT_BYTES
    communicators = 1 + sum(ranks > 1 for ranks in (run.tp, run.pp, run.dp))
    if peak * FRAGMENTATION_MOST + communicators * COMMUNICATOR_BYTES <= room:
        return Fit.SURE
    return Fit.TIGHT if peak <= room else Fit.NOT


def stage_bytes(run: Run, stage: int) -> float:
    """States, saved values of the microbatches in flight, and the layer or the loss in work."""
    unit = unit_of(run)
    kept, again = _kept(run, stage)
    live = _live(run, unit, stage)
    saved = kept * live
    if run.keeps_outputs and stage < run.pp - 1:
        saved += entry_bytes(run) * live
    layer = again + max(0.0, unit.working_bytes - unit.saved_bytes)
    ends = _loss_bytes(run, unit) if stage == run.pp - 1 else 0.0
    begin = state_bytes(run, stage)
    if run.states.all_new:
        # At the end of the backward: no saved values, but every gradient once more.
        new = run.stage_parameters(stage) * run.states.parameter_bytes
        return begin + max(saved + max(layer, ends), new + layer)
    return begin + saved + max(layer, ends)


def state_bytes(run: Run, stage: int) -> float:
    """Of parameters, gradients, optimizer and what a framework holds of them through a step."""
    states, num = run.states, run.stage_parameters(stage)
    whole = run.dp if run.zero == 3 else 1
    found = num * (states.parameter_bytes / whole + states.optimizer_bytes / run.states_ranks)
    if run.reduces_last and run.num_microbatches > 1:
        found += num * states.reduced_bytes
    else:
        found += num * states.gradient_bytes / whole
    if run.keeps_gathered:
        found += num * 2
    return found + num * run.replica_bytes


def _kept(run: Run, stage: int) -> tuple[float, float]:
    """Bytes a microbatch leaves on a stage, and those of a layer that a backward makes again."""
    all_of = saved_bytes(run)
    entry = entry_bytes(run)
    layers = run.layers_of_stage[stage]
    if run.stage_recomputed:
        again = run.stage_recomputed[stage]
        return (layers - again) * all_of + again * entry, all_of if again else 0.0
    scores = 0 if run.style.flash else 5 * run.sizes.heads * run.sizes.seq**2 * run.sizes.batch
    dropped = {
        "none": 0.0,
        "full": all_of - entry,
        "half": all_of / 2,
        "op": all_of / 2,
        "attention": scores / run.tp,
    }[run.recompute]
    return layers * (all_of - dropped), dropped


def entry_bytes(run: Run) -> float:
    """Of what enters a layer, of one microbatch."""
    split = run.tp if run.sequence_parallel else 1
    size = 4 if run.dtype == "float32" else 2
    return size * run.sizes.batch * run.sizes.seq * run.hidden / split


def _live(run: Run, unit: Unit, stage: int) -> float:
    """Microbatches of all its layers that a stage holds at once."""
    if run.pp == 1 or run.schedule == "1f1b":
        return one_f_one_b_live(stage, stages=run.pp, num_microbatches=run.num_microbatches)
    pending = pending_share(run)
    share = {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: -1.0,
        Kind.INPUT_GRADIENT: pending - 1,
        Kind.WEIGHT_GRADIENT: -pending,
    }
    live = most = 0.0
    for action in table(run, unit)[stage]:
        live += share[action.kind] * run.layers_of_chunk[action.chunk]
        most = max(most, live)
    return most / run.layers_of_stage[stage]


def _loss_bytes(run: Run, unit: Unit) -> float:
    """Of head and loss: of their program, or of so many bytes a logit."""
    if run.logit_bytes is None:
        return unit.rest_bytes
    vocab = run.sizes.vocab if run.whole_ends else run.sizes.vocab / run.tp
    return run.logit_bytes * run.sizes.batch * run.sizes.seq * vocab
