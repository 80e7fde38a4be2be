"""Barriers and fences (PTX ISA, "Parallel Synchronization and Communication Instructions")."""

from __future__ import annotations

from mlakern.emulator import barriers, fences, mbarrier
from mlakern.emulator.emitter import Emitter
from mlakern.emulator.observer import Fence
from mlakern.emulator.opcodes.bits import truth
from mlakern.emulator.opcodes.memory import SCOPES, address, argument
from mlakern.emulator.opcodes.table import Control, opcode
from mlakern.emulator.program import Instruction, Memory, Operand, Sink
from mlakern.emulator.values import Value

# Named barriers of a CTA


def _number_and_count(e: Emitter, i: Instruction, first: int, count_at: int) -> str:
    number = argument(e, e.read(i.operands[first], 32))
    count = "None"
    if len(i.operands) > count_at:
        count = argument(e, e.read(i.operands[count_at], 32))
    return f"{number}, {count}"


def _aligned(i: Instruction) -> bool:
    return i.row.name.startswith("bar.") or i.has("aligned")


def _sync(e: Emitter, i: Instruction) -> None:
    if _aligned(i):
        e.converge()
    function = e.constant(barriers.sync)
    args = f"g, {_number_and_count(e, i, 0, 1)}, {_aligned(i)}, {e.site}"
    done = e.temporary(f"{function}({args})")
    e.line(f"if {done} is not True: return BLOCKED if {done} is None else ({done},)")


def _arrive(e: Emitter, i: Instruction) -> None:
    if _aligned(i):
        e.converge()
    function = e.constant(barriers.arrive)
    e.line(f"{function}(g, {_number_and_count(e, i, 0, 1)}, {e.site})")


def _reduce(e: Emitter, i: Instruction) -> None:
    if _aligned(i):
        e.converge()
    source = truth(e.read(i.operands[-1], 1))
    number = e.get(e.read(i.operands[1], 32), "i")
    count = e.get(e.read(i.operands[2], 32), "i") if len(i.operands) == 4 else "None"
    operation = i.choice(("popc", "and", "or"))
    function = e.constant(barriers.reduce)
    flag = e.get(source, "b" if source.scalar else "p")
    args = f"g, {number}, {count}, {operation!r}, {flag}, {_aligned(i)}, {e.site}"
    found = e.temporary(f"{function}({args})")
    e.line(f"if {found} is None: return BLOCKED")
    if operation == "popc":
        e.set(i.operands[0], "i", found, 32)
    else:
        e.set(i.operands[0], "b", f"bool({found})", 1)


for _name in ("bar", "bar.cta", "barrier", "barrier.cta"):
    # bar is always aligned.
    _matters, _inert = ("aligned", "") if _name.startswith("barrier") else ("", "aligned")
    opcode(f"{_name}.sync", "s s?", "", _matters, Control.BLOCKING, ignored=_inert)(_sync)
    opcode(f"{_name}.arrive", "s s", "", _matters, Control.BLOCKING, ignored=_inert)(_arrive)
    opcode(
        f"{_name}.red",
        "d s s s?",
        "u32 pred",
        f"{_matters} popc and or",
        Control.BLOCKING,
        ignored=_inert,
    )(_reduce)


# The barrier of a cluster


@opcode("barrier.cluster.arrive", "", "", "aligned relaxed", Control.CONVERGED, ignored="release")
def cluster_arrive(e: Emitter, i: Instruction) -> None:
    if i.has("aligned"):
        e.converge()
    function = e.constant(barriers.cluster_arrive)
    e.line(f"{function}(g, {not i.has('relaxed')}, {e.site})")


@opcode("barrier.cluster.wait", "", "", "aligned", Control.BLOCKING, ignored="acquire")
def cluster_wait(e: Emitter, i: Instruction) -> None:
    if i.has("aligned"):
        e.converge()
    function = e.constant(barriers.cluster_wait)
    e.line(f"if not {function}(g, True, {e.site}): return BLOCKED")


# mbarrier

_SPACES = "shared shared::cta shared::cluster"
_ORDER = f"release acquire {SCOPES}"


def _barrier(e: Emitter, operand: Operand) -> Value:
    """The shared address of an mbarrier, from a shared or a generic address."""
    assert isinstance(operand, Memory)
    return address(e, operand, "shared")


def each_lane(e: Emitter, values: list[Value], code: str, result: str | None = None) -> str | None:
    """Call code with scalars, once if all values are the same in all lanes, else lane by lane."""
    if e.scalar(*values):
        line = code.format(*(e.get(value, "i") for value in values), g="g")
        if result is None:
            e.line(line)
            return None
        return e.temporary(line)
    names = [e.name() for _ in values]
    lists = [f"{e.get(value, 'U')}.tolist()" for value in values]
    each = e.name("g")
    group = e.constant(fences.lanes_of)
    loop = f"for {', '.join([each, *names])} in zip({group}(g), {', '.join(lists)})"
    call = code.format(*names, g=each)
    if result is None:
        e.line(f"{loop}: {call}")
        return None
    return e.temporary(f"array([{call} {loop}], {e.dtype('u', 64)})")


@opcode("mbarrier.init", "m s", "b64", ignored=_SPACES)
def mbarrier_init(e: Emitter, i: Instruction) -> None:
    where, count = _barrier(e, i.operands[0]), e.read(i.operands[1], 32)
    function = e.constant(mbarrier.init)
    each_lane(e, [where, count], f"{function}({{g}}, {{0}}, {{1}}, {e.site})")


@opcode("mbarrier.inval", "m", "b64", ignored=_SPACES)
def mbarrier_inval(e: Emitter, i: Instruction) -> None:
    function = e.constant(mbarrier.invalidate)
    each_lane(e, [_barrier(e, i.operands[0])], f"{function}({{g}}, {{0}})")


def _arrive_on(e: Emitter, i: Instruction, drop: bool = False, expect: bool = False) -> None:
    has_state = not isinstance(i.operands[0], Memory)
    at = 1 if has_state else 0
    extra = e.read(i.operands[at + 1], 32) if len(i.operands) > at + 1 else None
    one = Value(32, "i", {"i": "1"})
    zero = Value(32, "i", {"i": "0"})
    count = one if expect or extra is None else extra
    size = extra if expect and extra is not None else zero
    function = e.constant(mbarrier.arrive)
    code = f"{function}({{g}}, {{0}}, {{1}}, {{2}}, {drop}, {not i.has('relaxed')}, {e.site})"
    wanted = has_state and not isinstance(i.operands[0], Sink)
    values = [_barrier(e, i.operands[at]), count, size]
    name = each_lane(e, values, code, "state" if wanted else None)
    if wanted and name is not None:
        form = "i" if e.scalar(*values) else "u"
        e.bind(i.operands[0], Value(64, form, {form: name}))


_ARRIVE = f"{_SPACES} {_ORDER} noComplete"  # what it ignores


@opcode("mbarrier.arrive", "d m s?", "b64", "relaxed", ignored=_ARRIVE)
def mbarrier_arrive(e: Emitter, i: Instruction) -> None:
    _arrive_on(e, i)


@opcode("mbarrier.arrive.expect_tx", "d m s", "b64", "relaxed", ignored=_ARRIVE)
def mbarrier_arrive_expect(e: Emitter, i: Instruction) -> None:
    _arrive_on(e, i, expect=True)


@opcode("mbarrier.arrive_drop", "d m s?", "b64", "relaxed", ignored=_ARRIVE)
def mbarrier_arrive_drop(e: Emitter, i: Instruction) -> None:
    _arrive_on(e, i, drop=True)


@opcode("mbarrier.arrive_drop.expect_tx", "d m s", "b64", "relaxed", ignored=_ARRIVE)
def mbarrier_arrive_drop_expect(e: Emitter, i: Instruction) -> None:
    _arrive_on(e, i, drop=True, expect=True)


@opcode("mbarrier.expect_tx", "m s", "b64", ignored=f"{_SPACES} relaxed {SCOPES}")
def mbarrier_expect(e: Emitter, i: Instruction) -> None:
    values = [_barrier(e, i.operands[0]), e.read(i.operands[1], 32)]
    each_lane(e, values, f"{e.constant(mbarrier.expect)}({{g}}, {{0}}, {{1}})")


@opcode("mbarrier.complete_tx", "m s", "b64", ignored=f"{_SPACES} relaxed {SCOPES}")
def mbarrier_complete(e: Emitter, i: Instruction) -> None:
    values = [_barrier(e, i.operands[0]), e.read(i.operands[1], 32)]
    each_lane(e, values, f"{e.constant(mbarrier.complete)}({{g}}, {{0}}, {{1}})")


def _wait(e: Emitter, i: Instruction) -> None:
    """Operands: predicate, address, parity or state, and perhaps a time limit, which is ignored."""
    parity = i.has("parity")
    where = _barrier(e, i.operands[1])
    what = e.read(i.operands[2], 32 if parity else 64)
    wait = mbarrier.wait_parity if parity else mbarrier.wait_state
    acquire = not i.has("relaxed")
    if e.scalar(where, what):
        function = e.constant(wait)
        args = f"g, {e.get(where, 'i')}, {e.get(what, 'i')}, {acquire}, {e.site}"
        done = e.temporary(f"{function}({args})")
        e.line(f"if {done} is None: return BLOCKED")
        e.bind(i.operands[0], Value(1, "b", {"b": done}))
        return
    function = e.constant(fences.wait_lanes)
    name = e.constant(wait)
    args = f"g, {name}, {e.get(where, 'U')}, {e.get(what, 'U')}, {acquire}, {e.site}"
    done = e.temporary(f"{function}({args})")
    e.line(f"if type({done}) is tuple: return {done}")
    e.line(f"if {done} is None: return BLOCKED")
    e.bind(i.operands[0], Value(1, "p", {"p": e.temporary(f"full(g.width, {done})")}))


for _name in ("mbarrier.try_wait", "mbarrier.test_wait"):
    opcode(
        _name,
        "d m s s?",
        "b64",
        "parity relaxed",
        Control.BLOCKING,
        ignored=f"{_SPACES} {_ORDER}",
    )(_wait)


@opcode("mbarrier.pending_count", "d s", "b64")
def mbarrier_pending(e: Emitter, _: Instruction) -> None:
    raise e.error("the state of an mbarrier is opaque here: pending_count is not supported")


# Fences


def _fence(e: Emitter, kind: Fence) -> None:
    function = e.constant(fences.fence)
    e.line(f"{function}(g, {e.constant(kind)})")


_FENCE_ORDER = (
    f"sc acq_rel acquire release sync_restrict::shared::cluster sync_restrict::shared::cta {SCOPES}"
)


@opcode("fence", ignored=_FENCE_ORDER)
def fence(e: Emitter, _: Instruction) -> None:
    _fence(e, Fence.THREAD)


@opcode("membar", ignored="cta gl sys")
def membar(e: Emitter, _: Instruction) -> None:
    _fence(e, Fence.THREAD)


@opcode("fence.proxy.async", ignored="global shared::cta shared::cluster generic")
def fence_proxy_async(e: Emitter, _: Instruction) -> None:
    _fence(e, Fence.PROXY_ASYNC)


@opcode("fence.proxy.async::generic", ignored=_FENCE_ORDER)
def fence_proxy_generic(e: Emitter, _: Instruction) -> None:
    _fence(e, Fence.PROXY_ASYNC)


@opcode("fence.proxy.alias")
def fence_proxy_alias(e: Emitter, _: Instruction) -> None:
    """No effect on values."""


@opcode("fence.proxy.tensormap::generic", "m? s?", ignored=f"acquire release {SCOPES}")
def fence_proxy_tensormap(e: Emitter, _: Instruction) -> None:
    """Tensor maps are read when they are used: no effect on values."""


@opcode("fence.mbarrier_init", ignored="release cluster")
def fence_mbarrier_init(e: Emitter, _: Instruction) -> None:
    _fence(e, Fence.MBARRIER_INIT)
