"""Tests that the machine for PTX computes as GPUs do, and notices what they would not forgive."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from testbed.kernels.device_work import is_half_rate
from testbed.kernels.ptx_machine import arithmetic
from testbed.kernels.ptx_machine.machine import SECTOR_BYTES, MachineError, Profile, Program, run
from testbed.kernels.ptx_machine.memory import AccessError, GlobalMemory
from testbed.kernels.ptx_machine.module import Module

# Stores to word `tid` of the tensor what the body leaves in %r9; %rd1: its address, %r1: the thread's index.
HEAD = """
.version 9.0
.target sm_80
.address_size 64
.shared .align 4 .b8 words[256];
.visible .entry kernel(
	.param .u64 kernel_param_0
)
{
	.reg .b32 	%r<20>;
	ld.param.u64 	%rd5, [kernel_param_0];
	cvta.to.global.u64 	%rd4, %rd5;
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd1, %rd4, %rd3;
	mul.lo.s32 	%r2, %r1, 4;
	mov.u32 	%r3, words;
	add.s32 	%r4, %r3, %r2;
	xor.b32 	%r5, %r4, 4;
"""
TAIL = """
	st.global.u32 	[%rd1], %r9;
	ret;

}
"""


def stored(body: str, threads: int = 64, profile: Profile | None = None) -> NDArray[np.uint32]:
    """The tensor after a grid block has run the body."""
    room = np.zeros(threads + SECTOR_BYTES // 4, np.uint32)
    first = -room.ctypes.data % SECTOR_BYTES // 4
    tensor = room[first : first + threads]
    address = tensor.ctypes.data
    program = Program(Module(HEAD + body + TAIL).kernel("kernel"))
    run(program, (1, 1), threads, [address.to_bytes(8, "little")], GlobalMemory([(address, address + tensor.nbytes)]), profile)
    return tensor


def test_threads_that_branch_apart_compute_their_part_and_join() -> None:
    body = """
	and.b32 	%r6, %r1, 1;
	setp.eq.s32 	%p1, %r6, 0;
	mov.u32 	%r9, 0;
	@%p1 bra 	$L__BB0_2;
$L__BB0_1:
	add.s32 	%r9, %r9, 5;
	setp.lt.s32 	%p2, %r9, %r1;
	@%p2 bra 	$L__BB0_1;
$L__BB0_2:
	shfl.sync.bfly.b32 	%r9|%p3, %r9, 1, 31, -1;
"""
    sums = [0 if thread % 2 == 0 else max(5, -(-thread // 5) * 5) for thread in range(64)]
    assert stored(body).tolist() == [sums[thread ^ 1] for thread in range(64)]


EXCHANGE = """
	st.shared.u32 	[%r4], %r1;
	bar.sync 	0;
	ld.shared.u32 	%r9, [%r5];
"""


def test_threads_read_what_others_have_written_before_a_barrier() -> None:
    assert stored(EXCHANGE).tolist() == [thread ^ 1 for thread in range(64)]


@pytest.mark.parametrize(
    "body, error, finding",
    [
        (EXCHANGE.replace("bar.sync", "// "), AccessError, "is read that another thread has written since the last barrier"),
        (EXCHANGE + "\tst.shared.u32 [%r4], %r1;", AccessError, "is written that another thread has read since the last barrier"),
        (EXCHANGE.replace("[%r4]", "[%r3]"), AccessError, "threads write one word of shared memory at once"),
        (EXCHANGE.replace("\tst.", "\tsetp.lt.s32 %p1, %r1, 32;\n\t@%p1 st."), AccessError, "nobody has written"),
        (EXCHANGE.replace("[%r4]", "[%r4+4]"), AccessError, "leaves shared memory"),
        ("\tld.global.u32 %r9, [%rd1+4];", AccessError, "1 accesses of 4 bytes leave the tensors"),
        ("\tld.global.u32 %r9, [%rd1+2];", AccessError, "an access of 4 bytes is not aligned"),
        ("\tsetp.lt.s32 %p1, %r1, 5;\n\t@%p1 bra $L1;\n\tbar.sync 0;\n$L1:\n\tbar.sync 0;", MachineError, "never reach"),
        (
            "\tsetp.lt.s32 %p1, %r1, 5;\n\t@%p1 bra $L1;\n\tshfl.sync.bfly.b32 %r9|%p2, %r1, 1, 31, -1;\n$L1:",
            MachineError,
            "some of its lanes",
        ),
        ("\tshfl.sync.bfly.b32 %r9|%p2, %r1, 1, 15, -1;", MachineError, "only shuffles of whole warps"),
        ("\tpopc.b32 %r9, %r1;", MachineError, "popc.b32 is not known here"),
        ("\tsetp.lt.s32 %p1, %r1, 5;\n\t@%p1 call.uni __assertfail, (param0);\n\tmov.u32 %r9, 0;", MachineError, "failed for 5 threads"),
    ],
)
def test_what_a_gpu_need_not_do_as_expected_ends_the_run(body: str, error: type[Exception], finding: str) -> None:
    with pytest.raises(error, match=finding):
        stored(body)


def test_a_kernel_is_not_started_with_parameters_of_another_size() -> None:
    with pytest.raises(MachineError, match="parameters of other sizes"):
        run(Program(Module(HEAD + TAIL).kernel("kernel")), (1, 1), 32, [b"1234"], GlobalMemory([]))


def test_a_profile_has_instructions_of_warps_and_the_sectors_that_they_touch() -> None:
    apart, neighbours = Profile(), Profile()
    stored("\tmov.u32 %r9, %r1;", profile=neighbours)
    stored("\tand.b32 %r6, %r1, 1;\n\tsetp.eq.s32 %p1, %r6, 0;\n\tmov.u32 %r9, 1;\n\t@%p1 st.global.u32 [%rd1], %r9;", profile=apart)
    assert neighbours.issued["mov.u32"] == 2 * 3  # of two warps
    assert (neighbours.touched_bytes["st"], neighbours.sectors["st"]) == (64 * 4, 64 * 4 // 32)
    assert (apart.touched_bytes["st"], apart.sectors["st"]) == (96 * 4, 2 * 64 * 4 // 32)


@pytest.mark.parametrize(
    "op, expected",
    [
        *((op, True) for op in ("add.s64", "xor.b32", "and.pred", "setp.num.f32", "selp.f32", "max.f32", "prmt.b32", "cvt.rn.f16x2.f32")),
        *((op, False) for op in ("add.rn.f32", "neg.f32", "mul.lo.s32", "mul.wide.u32", "fma.rn.f32", "mov.b32", "cvt.s64.s32", "bra")),
    ],
)
def test_integers_comparisons_and_selections_are_of_half_rate_and_products_moves_and_floats_are_not(op: str, expected: bool) -> None:
    assert is_half_rate(op) == expected


def floats(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def test_a_fused_product_and_sum_is_rounded_once() -> None:
    generator = np.random.default_rng(1)
    a, b = (generator.standard_normal(4000).astype(np.float32) for _ in range(2))
    c = -(a * b) * (1 + generator.integers(-3, 4, 4000).astype(np.float32) * np.float32(2.0**-23))
    nearest, down = arithmetic.fma_to_nearest(a, b, c), arithmetic.fma_down(a, b, c)
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    for value, low, high in zip(exact, down, np.nextafter(down, np.float32(np.inf)), strict=True):
        assert Fraction(float(low)) <= value < Fraction(float(high))
    for value, found, low in zip(exact, nearest, down, strict=True):
        others = (float(low), float(np.nextafter(low, np.float32(np.inf))))
        assert abs(Fraction(float(found)) - value) == min(abs(Fraction(other) - value) for other in others)


def test_nan_has_the_bits_of_gpus_and_loses_against_numbers_in_a_maximum() -> None:
    with np.errstate(all="ignore"):
        add = arithmetic.operation("add.rn.f32")[0]
        assert add(floats(np.inf), floats(-np.inf)).view(np.uint32).tolist() == [0x7FFFFFFF]
        assert arithmetic.larger_f32(floats(np.nan, 1, -0.0, 0.0), floats(2, np.nan, 0.0, -0.0)).view(np.uint32).tolist() == [
            0x40000000,
            0x3F800000,
            0,
            0,
        ]
        assert arithmetic.to_bf16(floats(np.nan, 1 + 2.0**-8, 1 + 3 * 2.0**-8)).tolist() == [0x7FFF, 0x3F80, 0x3F82]


@pytest.mark.parametrize(
    "how, expected",
    [
        ("lt", [True, False, False]),
        ("geu", [False, True, True]),
        ("neu", [True, False, True]),
        ("nan", [False, False, True]),
        ("num", [True, True, False]),
    ],
)
def test_comparisons_with_nan_are_false_unless_their_name_has_a_u_or_is_nan(how: str, expected: list[bool]) -> None:
    compare = arithmetic.compared(how, "f32")
    assert compare(floats(1, 2, np.nan), floats(2, 2, 2)).tolist() == expected


@pytest.mark.parametrize(
    "op, inputs, expected",
    [
        ("prmt.b32", (0x33221100, 0x77665544, 0x7531), 0x77553311),
        ("prmt.b32", (0x80FF7F01, 0, 0xB198), 0xFF7F0000),  # with their signs: byte 3, byte 1 itself, byte 1, byte 0
        ("bfi.b32", (0xABC, 0xFFFFFFFF, 8, 4), 0xFFFFFCFF),
        ("shl.b32", (1, 32), 0),
        ("shr.u32", (0x80000000, 31), 1),
        ("shr.u32", (0x80000000, 40), 0),
        ("shr.s32", (0x80000000, 40), 0xFFFFFFFF),
        ("mul.lo.s32", (0xFFFFFFFF, 3), 0xFFFFFFFD),
        ("mul.wide.s32", (0xFFFFFFFF, 3), 2**64 - 3),
        ("mul.wide.u32", (0xFFFFFFFF, 3), 3 * (2**32 - 1)),
        ("cvt.s64.s32", (0xFFFFFFFE,), 2**64 - 2),
        ("cvt.u16.u32", (0x12345,), 0x2345),
    ],
)
def test_integers_are_those_of_the_instruction_set(op: str, inputs: tuple[int, ...], expected: int) -> None:
    compute, kinds = arithmetic.operation(op)
    values = []
    for index, number in enumerate(inputs):
        dtype = arithmetic.DTYPES[kinds[min(index, len(kinds) - 1)]]
        values.append(np.array(number, f"u{dtype.itemsize}").view(dtype))
    found = np.asarray(compute(*values))
    assert int(found.view(f"u{found.itemsize}")) == expected
