"""A modified client: its processes lie as SWARM_TEST_CHEAT says.

With this folder on PYTHONPATH, Python imports this module at its start, in the daemon and in its
workers. Each cheat replaces a function of the client when the function's module is imported; the
rest is the product. Three more variables:

    SWARM_TEST_LIED          a file that is made when the cheat has been carried out
    SWARM_TEST_UNWATCHED     a file; while it exists there are no audits, for the cheats that say so
    SWARM_TEST_PACE_SECONDS  the least time of a forward pass
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

CHEAT = os.environ.get("SWARM_TEST_CHEAT", "")
PACE_SECONDS = float(os.environ.get("SWARM_TEST_PACE_SECONDS", "0"))
UNWATCHED = Path(os.environ.get("SWARM_TEST_UNWATCHED", "/nowhere"))

RUNNER = "swarm_client.stage.worker.stage_runner"
EXCHANGE = "swarm_client.auditing.exchange"
MEMBER = "swarm_client.volunteer.member"
AUDITOR = "swarm_client.auditing.auditor"
SAMPLES = "swarm_client.training_data.run_samples"
RECEIPTS = "swarm_client.pipeline.receipts"
STEPS = "swarm_client.stage.worker.step_runner"
REDUCE = "swarm_client.averaging.all_reduce.reduce"
LINK = "swarm_client.averaging.all_reduce.member_link"
STATEMENTS = "swarm_client.auditing.sum_statements"
CLOSE = "swarm_client.pipeline.step_close"
SELF_TEST = "swarm_client.stage.worker.self_test"
SELF_TEST_HANDLE = "swarm_client.stage.handle.self_test"

OTHER = "f" * 32
"""A digest of nothing."""


def _lied() -> None:
    """Leave the file that says that the cheat was carried out."""
    if mark := os.environ.get("SWARM_TEST_LIED"):
        Path(mark).touch()


def _gradients(module: ModuleType, change: Callable[[Any, Any, int], Any], *, ends: bool) -> None:
    """Change what a backward pass gives: the parameters' gradients; with `ends` the input's."""
    runner = module.StageRunner
    honest, computed = runner._differentiate, runner._computed

    def lying(self: Any, gradients: Any) -> Any:
        _lied()
        return [change(self, tensor, n) for n, tensor in enumerate(computed(self, gradients))]

    def differentiate(self: Any, *arguments: Any) -> Any:
        entry, gradients = honest(self, *arguments)
        if ends and entry is not None:
            _lied()
            entry = change(self, entry, -1)
        return entry, gradients

    runner._differentiate, runner._computed = differentiate, lying


def _scaled(factor: float, *, ends: bool) -> Callable[[ModuleType], None]:
    return lambda module: _gradients(module, lambda _, tensor, __: tensor * factor, ends=ends)


def _noise(module: ModuleType) -> None:
    """One per cent of noise, the same each time."""
    import torch

    def noisy(_: Any, tensor: Any, number: int) -> Any:
        generator = torch.Generator().manual_seed(number + 2)
        noise = torch.randn(tensor.shape, generator=generator)
        return tensor + 0.01 * tensor.norm() / max(1.0, float(tensor.numel())) ** 0.5 * noise

    _gradients(module, noisy, ends=False)


def _one_element(module: ModuleType) -> None:
    """A single element of each gradient, a hundred times the largest."""

    def changed(_: Any, tensor: Any, __: int) -> Any:
        tensor = tensor.clone()
        tensor.view(-1)[0] = 100.0 * float(tensor.abs().max()) + 1.0
        return tensor

    _gradients(module, changed, ends=False)


def _outputs(change: Callable[[Any], Any]) -> Callable[[ModuleType], None]:
    """Change the activation that is sent on, wherever it is computed."""

    def patch(module: ModuleType) -> None:
        honest = module.ForwardPasses.run

        def run(
            self: Any, parameter_set: Any, inputs: Any, keep_graph: bool, entry: Any = None
        ) -> Any:
            graph = honest(self, parameter_set, inputs, keep_graph, entry)
            if parameter_set.stage.is_last:
                return graph
            _lied()
            return replace(graph, output=change(graph.output))

        module.ForwardPasses.run = run

    return patch


def _other_output_signed(module: ModuleType) -> None:
    """Sign another output than the one that was sent: the chain breaks."""
    honest = module.StageRunner._record

    def record(self: Any, digests: Any) -> Any:
        transcript = honest(self, digests)
        if not transcript.output_gradient:
            return transcript
        _lied()
        return transcript.model_copy(update={"output": OTHER})

    module.StageRunner._record = record


def _other_gradient_signed(module: ModuleType) -> None:
    """Sign the digest of a gradient that was not added."""
    honest = module.StageRunner._record

    def record(self: Any, digests: Any) -> Any:
        _lied()
        return honest(self, digests).model_copy(update={"gradient": OTHER})

    module.StageRunner._record = record


def _stale(module: ModuleType) -> None:
    """Compute with the parameters of the start for ever: gradients of another model."""
    runner = module.StageRunner
    run, differentiate = module.ForwardPasses.run, runner._differentiate
    first: dict[int, list[Any]] = {}

    @contextmanager
    def at_the_start(parameters: Sequence[Any]) -> Iterator[None]:
        # By exchange of their memory: autograd refuses parameters that were written to.
        now = [p.data for p in parameters]
        for parameter, old in zip(parameters, first[id(parameters)], strict=True):
            parameter.data = old
        try:
            yield
        finally:
            for parameter, new in zip(parameters, now, strict=True):
                parameter.data = new

    def stale_run(self: Any, parameter_set: Any, *arguments: Any, **named: Any) -> Any:
        import torch

        parameters = parameter_set.parameters
        old = first.setdefault(id(parameters), [p.detach().clone() for p in parameters])
        if not all(map(torch.equal, old, parameters)):
            _lied()
        with at_the_start(parameters):
            return run(self, parameter_set, *arguments, **named)

    def stale_differentiate(
        self: Any, graph: Any, gradient: Any, parameters: Any, weights: Any
    ) -> Any:
        if not parameters:
            return differentiate(self, graph, gradient, parameters, weights)
        with at_the_start(parameters):
            return differentiate(self, graph, gradient, parameters, weights)

    module.ForwardPasses.run, runner._differentiate = stale_run, stale_differentiate


def _no_inputs(module: ModuleType) -> None:
    """Give auditors nothing."""
    from swarm_shared.base.errors import AdmissionError

    async def refuse(self: Any, remote: Any, request: Any, path: Any) -> None:
        _lied()
        raise AdmissionError("this peer does not like to be audited")

    module.KeptServer._write = refuse


def _lets_auditors_wait(module: ModuleType) -> None:
    """Give auditors neither tensors nor a refusal."""
    import trio

    async def wait(self: Any, remote: Any, request: Any, path: Any) -> None:
        _lied()
        await trio.sleep_forever()

    module.KeptServer._write = wait


def _wrong_inputs(module: ModuleType) -> None:
    """Give auditors other bytes of the right number."""
    honest = module.KeptServer._write

    async def write(self: Any, remote: Any, request: Any, path: Any) -> None:
        await honest(self, remote, request, path)
        _lied()
        path.write_bytes(os.urandom(path.stat().st_size))

    module.KeptServer._write = write


def _false_statements(module: ModuleType) -> None:
    """Contradict every receipt that is audited."""
    honest = module.Auditor._statement

    def statement(self: Any, order: Any, done: Any) -> Any:
        true = honest(self, order, done)
        if true.transcript is None:
            return true
        _lied()
        lie = true.transcript.model_copy(update={"gradient": OTHER})
        return true.model_copy(update={"transcript": lie, "distance": 1.0})

    module.Auditor._statement = statement


def _false_withheld(module: ModuleType) -> None:
    """Say of every audited peer that it gave no inputs."""
    honest = module.Auditor._statement

    def statement(self: Any, order: Any, _done: Any) -> Any:
        _lied()
        return honest(self, order, None)

    module.Auditor._statement = statement


def _made_up_loss(module: ModuleType) -> None:
    """Sign a loss of almost nothing."""
    honest: Any = module.receipt_signer

    def signer(*arguments: Any) -> Any:
        sign = honest(*arguments)

        def lie(counted: Any) -> Any:
            if counted.loss_sum is None:
                return sign(counted)
            _lied()
            return sign(replace(counted, loss_sum=0.008))

        return lie

    setattr(module, "receipt_signer", signer)  # noqa: B010


def _other_tokens(module: ModuleType) -> None:
    """Send other token ids than those that are leased, as a trainer."""
    honest = module.RunSamples.drawn

    async def drawn(self: Any, step: Any, microbatch: Any) -> Any:
        _lied()
        return await honest(self, step, microbatch + 1 if microbatch == 0 else microbatch - 1)

    module.RunSamples.drawn = drawn


# ---- sums


def _part(change: Callable[[Any], None]) -> Callable[[ModuleType], None]:
    """Change what is put into the average, and state digests that fit."""

    def patch(module: ModuleType) -> None:
        honest = module.StepRunner.prepare_round

        def prepare_round(self: Any, step: Any, gradients: Any) -> Any:
            found = honest(self, step, gradients)
            _lied()
            change(gradients)
            return found

        module.StepRunner.prepare_round = prepare_round

    return patch


def _notes_auditors(module: ModuleType) -> None:
    """Leave a file once an auditor has asked for anything that this peer counted of its own."""
    from swarm_shared.base.transcript import KeptTensors

    honest = module.KeptServer._write

    async def write(self: Any, remote: Any, request: Any, path: Any) -> None:
        if request.tensors in (KeptTensors.INPUTS, KeptTensors.COMPUTED):
            _watched().touch()
        await honest(self, remote, request, path)

    module.KeptServer._write = write


def _watched() -> Path:
    return Path(os.environ["SWARM_TEST_LIED"]).with_suffix(".watched")


def _part_while_unwatched(module: ModuleType) -> None:
    """Put something else in, as long as no auditor has been seen."""
    honest = module.StepRunner.prepare_round

    def prepare_round(self: Any, step: Any, gradients: Any) -> Any:
        found = honest(self, step, gradients)
        if not _watched().exists():
            _lied()
            _add_minus_eight_times(gradients)
        return found

    module.StepRunner.prepare_round = prepare_round


def _gone_when_doubted(module: ModuleType) -> None:
    """End at once when an attempt to close is aborted in which the sums have been checked."""
    from swarm_shared.protocol import AbortRound, Close, SumCheck

    honest = module.Member.handle
    checked = False

    def handle(self: Any, message: Any) -> None:
        nonlocal checked
        if isinstance(message, Close | SumCheck):
            checked = isinstance(message, SumCheck)
        if isinstance(message, AbortRound) and checked:
            os.kill(os.getpid(), signal.SIGKILL)
        honest(self, message)

    module.Member.handle = handle


def _add_minus_eight_times(gradients: Any) -> None:
    gradients.mul_(-7.0)


def _zero(gradients: Any) -> None:
    gradients.zero_()


def _largest(gradients: Any) -> None:
    gradients.fill_(2.0**53 - 1)


def _sum(change: Callable[[Any], None]) -> Callable[[ModuleType], None]:
    """Change the sums of the own slice, for all members alike."""

    def patch(module: ModuleType) -> None:
        honest: Any = module.reduce_piece

        def reduce_piece(own: Any, inputs: Any, codec: Any, out: Any) -> Any:
            honest(own, inputs, codec, out)
            _lied()
            change(out)
            return module.encode_piece(out, codec)

        setattr(module, "reduce_piece", reduce_piece)  # noqa: B010

    return patch


def _double(out: Any) -> None:
    out *= 2.0


def _add_one(out: Any) -> None:
    out[0] += 1.0


def _other_sum_for_one(module: ModuleType) -> None:
    """Send another sum to the first of the other members."""
    from swarm_client.averaging.all_reduce import exact_codec

    honest = module.MemberLink.send

    async def send(self: Any, kind: Any, *, payload: Any = b"", **fields: Any) -> None:
        members = self._spec.members
        victim = next(m for m in members if m != self._spec.me)
        if kind is module.FrameKind.SUM and self.peer == victim:
            _lied()
            elements = self._summed_elements(fields.get("piece", 0))
            counts = exact_codec.decode(payload, elements)
            counts[0] += 1
            payload = exact_codec.encode(counts)
        await honest(self, kind, payload=payload, **fields)

    def summed_elements(self: Any, piece: int) -> int:
        from swarm_client.averaging.all_reduce.plan import partition

        spec = self._spec
        start, stop = partition(spec)[spec.my_index].piece(piece)
        return stop - start

    module.MemberLink._summed_elements = summed_elements
    module.MemberLink.send = send


def _larger(digest: str, by: int) -> str:
    """A digest of other contents."""
    return f"{(int(digest, 16) + by) % 2**64:016x}"


def _shifted(digest: str) -> str:
    """A digest of other contents, larger by one."""
    return _larger(digest, 1)


def _stated(change: Callable[..., Any]) -> Callable[[ModuleType], None]:
    """Change what a statement says of each reduction; `change` gets the digests, this member's
    index, and what they are of."""

    def patch(module: ModuleType) -> None:
        honest = module.SumSigner.state

        class Liar:
            def __init__(self, digester: Any, me: Any) -> None:
                self._digester, self._me = digester, me

            async def digest(self, worker: Any, check: Any, reduction: Any) -> Any:
                found = await self._digester.digest(worker, check, reduction)
                me = reduction.members.index(self._me)
                _lied()
                return change(found, me, worker, check, reduction)

        async def state(self: Any, *arguments: Any) -> Any:
            liar = Liar(self._digester, self._identity.peer_id)
            return await honest(
                module.SumSigner(self._identity, self._membership, liar), *arguments
            )

        module.SumSigner.state = state

    return patch


def _the_added_one(digests: Any, me: int, worker: Any, check: Any, reduction: Any) -> Any:
    """State that what it added to the first element of its slice was in its own part."""
    import numpy as np

    from swarm_client.averaging.all_reduce.plan import slice_stops
    from swarm_shared.identity import norm_sketch
    from swarm_shared.identity.linear_digest import DigestKey

    sizes = worker.configured
    elements = sizes.own_elements if reduction.part == "own" else sizes.tied_elements
    weights = reduction.weights or (1,) * len(reduction.members)
    starts = (0, *slice_stops(elements, weights))
    if len(weights) == 1 or starts[me] == starts[me + 1]:
        return digests
    one = np.ones(1)
    key = DigestKey(check.seed, reduction.part)
    update = {"part": _larger(digests.part, key.digest(one, starts[me]))}
    if digests.part_sketch is not None:
        sketch = norm_sketch.Sketcher(check.seed, reduction.part).sketch(one, starts[me])
        both = norm_sketch.from_text(digests.part_sketch), sketch
        update["part_sketch"] = norm_sketch.to_text(norm_sketch.sketch_sum(both))
    return digests.model_copy(update=update)


def _another_sketch(digests: Any, me: int, worker: Any, check: Any, reduction: Any) -> Any:
    """The sketch of another part than was put in; what is stated of the slices later fits it, but
    for the slice of another member."""
    import numpy as np

    from swarm_shared.identity import norm_sketch

    more = np.zeros(norm_sketch.BUCKETS, np.uint64)
    more[0] = 1
    if digests.part_sketch is not None:
        both = norm_sketch.from_text(digests.part_sketch), more
        sketch = norm_sketch.to_text(norm_sketch.sketch_sum(both))
        return digests.model_copy(update={"part_sketch": sketch})
    if check.weights is None:
        return digests
    added = norm_sketch.sketch_digest(more, check.weights)
    parts = list(digests.parts)
    place = (me + 1) % len(parts)
    parts[place] = _larger(parts[place], added)
    update = {"part": _larger(digests.part, added), "parts": tuple(parts)}
    return digests.model_copy(update=update)


def _another_part(digests: Any, me: int, *_: Any) -> Any:
    """Another part than was put in, in the slice of another member."""
    update: dict[str, Any] = {"part": _shifted(digests.part)}
    if digests.parts:
        parts = list(digests.parts)
        place = (me + 1) % len(parts)
        parts[place] = _shifted(parts[place])
        update["parts"] = tuple(parts)
    return digests.model_copy(update=update)


def _another_result(digests: Any, me: int, *_: Any) -> Any:
    """Another result than was taken out, in the slice of another member."""
    update: dict[str, Any] = {"result": _shifted(digests.result)}
    if digests.results:
        results = list(digests.results)
        place = (me + 1) % len(results)
        results[place] = _shifted(results[place])
        update["results"] = tuple(results)
    return digests.model_copy(update=update)


def _another_received(digests: Any, me: int, *_: Any) -> Any:
    """State that another member has put in what this one has added to the sum."""
    if not digests.received:
        return digests
    received = list(digests.received)
    place = (me + 1) % len(received)
    others = sum(int(one, 16) for n, one in enumerate(received) if n != place)
    received[place] = f"{(int(digests.results[me], 16) - others) % 2**64:016x}"
    return digests.model_copy(update={"received": tuple(received)})


def _sums_that_do_not_add_up(digests: Any, me: int, *_: Any) -> Any:
    return digests.model_copy(update={"part": _shifted(digests.part)})


def _no_statement(module: ModuleType) -> None:
    """Do not answer a check of sums."""

    async def state(self: Any, *arguments: Any) -> Any:
        import trio

        _lied()
        await trio.sleep_forever()

    module.SumSigner.state = state


# ---- the close of a step


def _false_norm(module: ModuleType) -> None:
    """Report another norm than that of the average."""
    honest = module.StepRunner.norm

    def norm(self: Any, *arguments: Any) -> Any:
        found = honest(self, *arguments)
        _lied()
        return found.model_copy(update={"own_squared": found.own_squared * 1.00001})

    module.StepRunner.norm = norm


def _other_work(kind: str, other: Callable[[ModuleType, Any], Any]) -> Callable[[ModuleType], None]:
    """Do something else in place of one kind of a close's work."""

    def patch(module: ModuleType) -> None:
        honest = module.StepCloser._perform

        async def perform(self: Any, work: Any, worker: Any) -> None:
            if type(work).__name__ == kind:
                _lied()
                await other(module, work)
            await honest(self, work, worker)

        module.StepCloser._perform = perform

    return patch


async def _for_ever(_: ModuleType, __: Any) -> None:
    import trio

    await trio.sleep_forever()


async def _accuse(module: ModuleType, work: Any) -> None:
    """Say that the last member of the average has failed it."""
    raise module.RoundFailed("it sent nothing", work.reduction.members[-1])


def _other_state(module: ModuleType) -> None:
    """Give another state to those that join and to checkpoints."""
    honest = module.StepRunner.save

    def save(self: Any, path: Path, version: Any) -> Any:
        size = honest(self, path, version)
        content = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(content[:8], "little")
        struct.pack_into("<f", content, begin, 0.125)
        path.write_bytes(content)
        _lied()
        return size

    module.StepRunner.save = save


# ---- parts of experiments, no cheats by themselves


def _paced(module: ModuleType) -> None:
    """Make a slow machine of its own of each volunteer, however many processes share the
    processor; what it audits takes as long as what it counts."""
    honest = module.ForwardPasses.run

    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        due = time.monotonic() + PACE_SECONDS
        graph = honest(self, *arguments, **named)
        time.sleep(max(0.0, due - time.monotonic()))
        return graph

    module.ForwardPasses.run = run


def _audits_nothing(module: ModuleType) -> None:
    """Refuse all orders to audit, as a machine that is paused: no audit by it shows its lies."""

    def able(self: Any, order: Any) -> Any:
        raise module.SwarmError("this peer audits nothing at present")

    module.Auditor._able = able


def _audits_nothing_unwatched(module: ModuleType) -> None:
    """Audit nothing as long as the run is unwatched, as a machine that is paused."""
    honest = module.Auditor._able

    def able(self: Any, order: Any) -> Any:
        if UNWATCHED.exists():
            raise module.SwarmError("this peer audits nothing at present")
        return honest(self, order)

    module.Auditor._able = able


def _flips_once_unwatched(module: ModuleType) -> None:
    """Count honestly until the run is unwatched, and lie from then on."""
    lies = False

    def change(_: Any, tensor: Any, __: int) -> Any:
        nonlocal lies
        lies = lies or UNWATCHED.exists()
        return -tensor if lies else tensor

    _gradients(module, change, ends=False)


def _wrong_in_one_process(module: ModuleType) -> None:
    """Flip all signs in the first process that computes, as a bad page of its memory may: whatever
    it computes again is wrong again. Processes after it are honest."""
    honest = module.StageRunner._computed
    mark = Path(os.environ.get("SWARM_TEST_LIED", "/nowhere"))

    def computed(self: Any, gradients: Any) -> Any:
        found = honest(self, gradients)
        if not mark.exists():
            mark.write_text(str(os.getpid()))
        wrong = mark.read_text() == str(os.getpid())
        return [-tensor for tensor in found] if wrong else found

    module.StageRunner._computed = computed


def _short_self_test(module: ModuleType) -> None:
    """Self-tests take two seconds."""
    changed: Any = module
    honest = changed.run_self_test

    async def short(device: Any, threads: Any, seconds: Any, *more: Any) -> Any:
        return await honest(device, threads, min(seconds, 2.0), *more)

    changed.run_self_test = short


def _no_self_test(module: ModuleType) -> None:
    """A liar that is found stays away as long as it is refused."""
    changed: Any = module

    async def none(*_: Any) -> Any:
        raise changed.WorkerDied("a modified client tests nothing")

    changed.run_self_test = none


def _wrong_bit_in_self_test(module: ModuleType) -> None:
    """One bit of one gradient, in the second round of a self-test."""
    import torch

    honest, done = module.FixedWork.compute, 0

    def compute(self: Any) -> Any:
        nonlocal done
        done += 1
        found = honest(self)
        if done == 2:
            found["the gradient of the input"].view(-1).view(torch.int32)[5] ^= 1
        return found

    module.FixedWork.compute = compute


Patch = Callable[[ModuleType], None]
CHEATS: dict[str, tuple[tuple[str, Patch], ...]] = {
    "zeros": ((RUNNER, _scaled(0.0, ends=True)),),
    "zero gradients, honest boundary": ((RUNNER, _scaled(0.0, ends=False)),),
    "sign flipped": ((RUNNER, _scaled(-1.0, ends=False)),),
    "sign flipped, eight times": ((RUNNER, _scaled(-8.0, ends=True)),),
    "scaled by 1.01": ((RUNNER, _scaled(1.01, ends=False)),),
    "huge": ((RUNNER, _scaled(1e20, ends=True)),),
    "noise of 1 %": ((RUNNER, _noise),),
    "one element": ((RUNNER, _one_element),),
    "stale parameters": ((RUNNER, _stale),),
    "outputs of zeros": ((RUNNER, _outputs(lambda output: output * 0.0)),),
    "outputs scaled": ((RUNNER, _outputs(lambda output: output * 1.05)),),
    "another output signed": ((RUNNER, _other_output_signed),),
    "another gradient signed": ((RUNNER, _other_gradient_signed),),
    "no inputs for auditors": ((EXCHANGE, _no_inputs),),
    "zeros, and auditors that wait": (
        (RUNNER, _scaled(0.0, ends=True)),
        (EXCHANGE, _lets_auditors_wait),
        (AUDITOR, _audits_nothing),
    ),
    "wrong inputs for auditors": ((EXCHANGE, _wrong_inputs),),
    "false statements": ((AUDITOR, _false_statements),),
    "false claim of withheld inputs": ((AUDITOR, _false_withheld),),
    "made-up loss": ((RECEIPTS, _made_up_loss),),
    "other token ids": ((SAMPLES, _other_tokens),),
    "sum doubled": ((REDUCE, _sum(_double)),),
    "one added to a sum": ((REDUCE, _sum(_add_one)),),
    "another sum for one member": ((LINK, _other_sum_for_one),),
    "one added to a sum, and blamed on a member": (
        (REDUCE, _sum(_add_one)),
        (STATEMENTS, _stated(_another_received)),
    ),
    "one added to a sum, and stated as its own part": (
        (REDUCE, _sum(_add_one)),
        (STATEMENTS, _stated(_the_added_one)),
    ),
    "its part against its gradient": ((STEPS, _part(_add_minus_eight_times)),),
    "its part against its gradient, while unwatched": (
        (EXCHANGE, _notes_auditors),
        (STEPS, _part_while_unwatched),
    ),
    "its part against its gradient, until doubted": (
        (STEPS, _part(_add_minus_eight_times)),
        (MEMBER, _gone_when_doubted),
    ),
    "zeros as its part": ((STEPS, _part(_zero)),),
    "the largest numbers as its part": ((STEPS, _part(_largest)),),
    "another part stated": ((STATEMENTS, _stated(_another_part)),),
    "another sketch stated": ((STATEMENTS, _stated(_another_sketch)),),
    "another result stated": ((STATEMENTS, _stated(_another_result)),),
    "sums that do not add up": ((STATEMENTS, _stated(_sums_that_do_not_add_up)),),
    "no statement of sums": ((STATEMENTS, _no_statement),),
    "another norm": ((STEPS, _false_norm),),
    "accusations": ((CLOSE, _other_work("Reduce", _accuse)),),
    "no averages": ((CLOSE, _other_work("Reduce", _for_ever)),),
    "no updates": ((CLOSE, _other_work("ApplyStep", _for_ever)),),
    "another state for others": ((STEPS, _other_state),),
    "outputs that overflow": ((RUNNER, _outputs(lambda output: output * 0.0 + 3e38)),),
    "wrong in one process": (
        (RUNNER, _wrong_in_one_process),
        (SELF_TEST_HANDLE, _short_self_test),
    ),
    "wrong in one process, and in self-tests": (
        (RUNNER, _wrong_in_one_process),
        (SELF_TEST, _wrong_bit_in_self_test),
        (SELF_TEST_HANDLE, _short_self_test),
    ),
    "wrong in self-tests": ((SELF_TEST, _wrong_bit_in_self_test),),
    "no audits while unwatched": ((AUDITOR, _audits_nothing_unwatched),),
    "sign flipped once unwatched": (
        (AUDITOR, _audits_nothing_unwatched),
        (RUNNER, _flips_once_unwatched),
    ),
}


class _Loader(importlib.abc.Loader):
    """Loads a module and then changes it."""

    def __init__(self, honest: importlib.abc.Loader, patches: Sequence[Patch]) -> None:
        self._honest, self._patches = honest, patches

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._honest.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._honest.exec_module(module)
        for patch in self._patches:
            patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, patches: Sequence[Patch]) -> None:
        self._name, self._patches = name, patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._patches)
        return spec


patches = CHEATS.get(CHEAT, ())
if CHEAT and not {SELF_TEST, SELF_TEST_HANDLE} & {name for name, _ in patches}:
    patches += ((SELF_TEST_HANDLE, _no_self_test),)
if PACE_SECONDS:
    patches += ((RUNNER, _paced),)
for name in {name for name, _ in patches}:
    sys.meta_path.insert(0, _Finder(name, [patch for at, patch in patches if at == name]))
