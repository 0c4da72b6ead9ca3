"""Which compiled kernel a call takes: never one that was made for other arguments."""

import pytest
import torch

from midus.ops import launch as module
from midus.ops.launch import Constants, launch


class Kernel:
    """Compiles, and remembers what it was launched with."""

    arg_names = ("x", "size", "WIDTH", "FLAG")

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def compile_and_run(*args, **constants):
            calls = [(grid, args, constants)]
            self.compiled.append(calls)
            return Launched(calls)

        return compile_and_run


class Launched:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *args: self.calls.append((grid, args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(module, "_COMPILED", {})
    return Kernel()


def run(kernel, x=None, size=5, width=4, flag=False):
    x = torch.zeros(8) if x is None else x
    # Constants out of order: they must reach the kernel in the order of its signature.
    launch(kernel, (2, 3), (x, size), {"FLAG": flag, "WIDTH": width, "num_warps": 4})


def test_the_second_call_takes_the_compiled_kernel_with_constants_in_order(kernel):
    x = torch.zeros(8)
    run(kernel, x, 5)
    run(kernel, x, 6)
    assert len(kernel.compiled) == 1
    grid, args = kernel.compiled[0][1]
    assert grid == (2, 3, 1)
    assert args[0] is x
    assert args[1:] == (6, 4, False)


@pytest.mark.parametrize(
    "other",
    [
        {"size": 1},  # Triton makes 1 a constant
        {"size": 16},  # and uses divisibility
        {"size": 1 << 31},  # and wider integers
        {"width": 8},
        {"flag": True},
        {"x": torch.zeros(8, dtype=torch.float16)},
        {"x": torch.zeros(9)[1:]},  # not aligned to 16 bytes
    ],
)
def test_whatever_changes_the_code_is_compiled_anew(kernel, other):
    run(kernel)
    run(kernel, **other)
    assert len(kernel.compiled) == 2
    run(kernel, **other)
    assert len(kernel.compiled) == 2
    assert [len(calls) for calls in kernel.compiled] == [1, 2]


def test_values_that_change_no_code_share_a_kernel(kernel):
    x = torch.zeros(8)
    for size in (0.5, 1.0, 16.0):  # Triton looks into no float
        run(kernel, x, size)
    run(kernel, torch.nn.Parameter(x), 0.5)
    assert len(kernel.compiled) == 1
    assert [args[1] for _, args in kernel.compiled[0][1:]] == [1.0, 16.0, 0.5]


def test_constants_that_are_kept_are_told_apart_by_which_they_are(kernel):
    x, first, second = torch.zeros(8), Constants(FLAG=False, WIDTH=4), Constants(FLAG=True, WIDTH=8)
    for constants in (first, second, first, second):
        launch(kernel, (1,), (x, 5), constants)
    assert len(kernel.compiled) == 2
    assert kernel.compiled[0][1][1][1:] == (5, 4, False)
    assert kernel.compiled[1][1][1][1:] == (5, 8, True)


def test_kernels_of_the_same_sizes_are_looked_up_not_made():
    # Else every call would compile, and what is remembered would grow.
    from midus.ops.headwise_memory import backward_kernels, forward_kernels
    from midus.ops.rms_norm import kernels as rms_norm
    from midus.ops.rotary import kernels as rotary
    from midus.ops.token_step import attention_kernels, product_kernels

    device = torch.device("cpu")
    for make, sizes in (
        (rms_norm._forward_constants, (8, True)),
        (rms_norm._backward_constants, (8, 3, True, True, False, True)),
        (rotary._constants, (4, 2, 8, False)),
        (forward_kernels._forward_constants, (4, 8, 4, 8, 8, 2, False, True, 16)),
        (forward_kernels._cached_constants, (4, 8, 4, 8, 2, False, 16)),
        (backward_kernels._backward_constants, (4, 8, 4, 8, 8, 2, torch.float32)),
        (product_kernels._project_constants, (32, 4, 2, 8, False, True, device)),
        (attention_kernels._read_constants, (4, 8, 4, 8, 2, False, True, 8, device)),
    ):
        assert make(*sizes) is make(*sizes)
        assert isinstance(make(*sizes), Constants)
