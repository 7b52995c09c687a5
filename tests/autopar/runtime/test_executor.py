"""Handmade programs through `ParallelModule`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import BatchError, UnsupportedError
from tests.autopar.runtime.programs import Linear, batch, parallel_linear

LAYOUTS = [((1,), False), ((2,), False), ((2,), True), ((2, 2), True)]


def reference() -> tuple[float, torch.Tensor]:
    model = Linear()
    loss = model(**batch())
    loss.backward()
    assert model.weight.grad is not None
    return loss.item(), model.weight.grad


def run_step(sizes: tuple[int, ...], zero: bool) -> dict[str, Any]:
    parallel = parallel_linear(sizes, zero=zero)
    given = batch()
    loss = parallel(given)
    assert torch.equal(given["x"], batch()["x"])
    loss.backward()
    parameters = dict(parallel.named_parameters(remove_duplicate=False))
    assert parameters["tied.weight"] is parameters["weight"]
    assert len(list(parallel.parameters())) == 2
    assert parameters["unused"].grad is None
    once = parameters["weight"].grad.full_tensor().clone()
    (2 * parallel(given)).backward()
    return {
        "loss": loss.item(),
        "shape": tuple(loss.shape),
        "grad": once,
        "grad3": parameters["weight"].grad.full_tensor(),
        "calls": float(parallel.get_buffer("calls")),
        "steps": parallel.num_steps,
    }


@pytest.mark.parametrize(("sizes", "zero"), LAYOUTS)
def test_step_equals_one_process_and_backward_accumulates(
    pool: Any, sizes: Any, zero: bool
) -> None:
    loss, grad = reference()
    world = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    for found in pool(world).run(run_step, sizes, zero):
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        assert found["shape"] == ()
        torch.testing.assert_close(found["grad"], grad)
        torch.testing.assert_close(found["grad3"], 3 * grad)
        assert found["calls"] == 2.0
        assert found["steps"] == 2


def refusals() -> list[str]:
    parallel = parallel_linear((1,))
    weight = parallel.get_parameter("weight")
    messages = []

    def refused(function: Any) -> None:
        with pytest.raises(UnsupportedError) as caught:
            function()
        messages.append(str(caught.value))

    loss = parallel(batch())
    refused(lambda: parallel(batch()))
    with torch.no_grad():
        assert not parallel(batch()).requires_grad
    refused(lambda: torch.autograd.grad(loss, [weight]))
    refused(lambda: loss.backward(inputs=[weight]))
    refused(lambda: torch.autograd.grad(loss, [weight], create_graph=True))
    loss.backward(retain_graph=True)
    refused(lambda: loss.backward())
    loss = parallel(batch())
    del loss
    loss = parallel(batch())
    handle = weight.register_hook(lambda g: g)
    refused(lambda: loss.backward())
    handle.remove()
    refused(lambda: parallel.half())
    assert parallel.float() is parallel
    unplanned = parallel_linear((1,), prepare=False)
    refused(lambda: unplanned.parameters().__next__())
    refused(lambda: unplanned.state_dict())
    refused(lambda: unplanned.plan)
    unplanned(batch()).backward()
    assert unplanned.plan.model == "Linear"
    return messages


def test_what_cannot_be_exact_is_refused(pool: Any) -> None:
    (messages,) = pool(1).run(refusals)
    words = ["second training step", "selected", "selected", "second derivatives", "twice"]
    words += ["hook", "cast", "prepare(batch)", "prepare(batch)", "prepare(batch)"]
    for message, word in zip(messages, words, strict=True):
        assert word in message


def modes() -> None:
    parallel = parallel_linear((2,), zero=True, returns_dict=True)
    loss, aux = parallel(batch())
    assert set(aux) == {"y_sum"}
    assert not aux["y_sum"].requires_grad
    assert aux["y_sum"].item() == loss.item()
    parallel.eval()
    quiet, _ = parallel(batch())
    assert not quiet.requires_grad
    assert quiet.item() == loss.item()
    parallel.train()
    loss.backward()
    events = []
    weight = parallel.get_parameter("weight")
    weight.register_post_accumulate_grad_hook(lambda p: events.append(p.grad is not None))
    parallel(batch())[0].backward()
    assert events == [True]


def test_eval_and_dict_results_and_hooks(pool: Any) -> None:
    pool(2).run(modes)


def parts() -> list[int]:
    parallel = parallel_linear((2,))
    whole = parallel(batch())
    x = batch()["x"]
    slices = [parallel.batch_slices(rank)["x"] for rank in range(2)]
    assert sum(s.stop - s.start for s in slices) == len(x)
    own = parallel.batch_slices()["x"]
    whole.backward()
    part = parallel(parallel.shard({"x": x[own]}))
    assert part.item() == whole.item()
    part.backward()
    with pytest.raises(BatchError, match="expects"):
        parallel(parallel.shard({"x": x[:1]}))
    with pytest.raises(BatchError, match="None"):
        parallel(parallel.shard(None))
    sampler = parallel.sampler(list(range(20)), shuffle=True, seed=1)
    assert len(sampler) == 3
    drawn = [index for indices in sampler for index in indices]
    sampler.set_epoch(1)
    assert drawn != [index for indices in sampler for index in indices]
    last = list(parallel.sampler(list(range(20)), drop_last=False))[-1]
    assert last == [[18, 19], []][dist.get_rank()]
    return drawn


def test_parts_of_a_batch_are_taken_and_dealt_out(pool: Any) -> None:
    drawn = pool(2).run(parts)
    assert len(set(drawn[0] + drawn[1])) == 18
