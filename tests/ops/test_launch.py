"""Which compiled kernel a call takes: never one that was made for other arguments."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton_on_cpu  # noqa: F401  # before Triton
from triton import knobs
from triton.compiler import CompiledKernel

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


class Recorder:
    """Stands for Triton's launcher of NVIDIA GPUs, and keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, *args):
        self.calls.append(args)


Recorder.__module__ = "triton.backends.nvidia.driver"


@pytest.fixture
def on_gpu(monkeypatch):
    """Triton's own class of compiled kernels, with stand-ins for GPU, stream and launcher."""
    compiled = CompiledKernel.__new__(CompiledKernel)
    vars(compiled).update(
        module=None, function=77, packed_metadata=(4, 1, 0), _run=Recorder(), name="kernel",
        src=None, metadata=None,
    )  # fmt: skip
    monkeypatch.setattr(compiled, "_init_handles", lambda: None)
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda index: 9)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 9, raising=False)
    monkeypatch.setattr(module, "_is_on_gpu", lambda tensor: tensor.dtype != torch.int8)
    monkeypatch.setattr(module, "_COMPILED", {})

    class Compiles:
        arg_names = ("x", "y", "size", "WIDTH")

        def __getitem__(self, grid):
            return lambda *args, **constants: compiled

    kernel = Compiles()

    def run(x, y, size=5):
        launch(kernel, (2, 3), (x, y, size), {"WIDTH": 4})
        return compiled.run.calls

    run(torch.zeros(8), torch.zeros(8))  # compiles
    return run


def test_a_launcher_gets_addresses_with_all_that_triton_hands_it(on_gpu):
    x, y = torch.zeros(8), torch.zeros(8)
    with knobs.runtime.scope():
        knobs.runtime.launch_enter_hook = lambda metadata: None
        *_, by_triton = on_gpu(x, y)
    *_, by_address = on_gpu(x, y)
    assert by_triton[9:] == (x, y, 5, 4)
    assert by_address[9:] == (x.data_ptr(), y.data_ptr(), 5, 4)
    assert by_address[:6] == by_triton[:6] == (2, 3, 1, 9, 77, (4, 1, 0))
    assert by_address[6:9] == (None, None, None)  # metadata for hooks, and no hooks


def test_a_tensor_that_moved_is_read_where_it_is(on_gpu):
    x, y = torch.nn.Parameter(torch.zeros(8)), torch.zeros(8)
    first = on_gpu(x, y)[-1][9]
    x.data = torch.ones(8)
    second = on_gpu(x, y)[-1][9]
    assert first != second
    assert second == x.data_ptr()


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_whoever_listens_to_launches_hears_of_them(name, on_gpu):
    x, y = torch.zeros(8), torch.zeros(8)

    def listen(metadata):
        pass

    chain = getattr(knobs.runtime, name)
    chain.add(listen)
    try:
        call = on_gpu(x, y)[-1]
        assert call[9] is x
        assert call[7:9] == (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    finally:
        chain.remove(listen)
    assert on_gpu(x, y)[-1][9] == x.data_ptr()


def test_a_tensor_that_is_on_no_gpu_is_left_to_triton(on_gpu):
    x, wrong = torch.zeros(8), torch.zeros(16, dtype=torch.int8)
    on_gpu(x, wrong)  # compiles
    for tensors in ((x, wrong), (wrong, x)):
        on_gpu(*tensors)
        call = on_gpu(*tensors)[-1]
        assert call[9] is tensors[0]
        assert call[10] is tensors[1]  # Triton refuses the wrong one


class Launcher36:
    """As Triton 3.6 has it."""

    def __init__(self, scratch=0):
        self.global_scratch_size, self.profile_scratch_size = 0, scratch
        self.launch_cooperative_grid, self.launch_pdl = False, True
        self.calls = []

    def launch(self, *args):
        self.calls.append(args)

    # fmt: off
    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        global_scratch = None
        profile_scratch = "scratch" if self.profile_scratch_size else None
        self.launch(gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid,
                    self.launch_pdl, global_scratch, profile_scratch, *args)
    # fmt: on


Launcher36.__module__ = "triton.backends.nvidia.driver"


@pytest.mark.parametrize("scratch", [0, 16])
def test_past_a_known_launcher_its_function_gets_the_same(scratch, monkeypatch):
    # Of the kernel, which is a stand-in, and of its launcher, which the next test looks at.
    monkeypatch.setattr(module, "_has_line", lambda owner, method, line: True)
    launcher = Launcher36(scratch)
    compiled = SimpleNamespace(run=launcher, function=77, packed_metadata=(4, 1, 0))
    _, run, fixed = module._direct(compiled)
    run(2, 3, 1, 9, *fixed, 1234, 5)
    launcher(2, 3, 1, 9, 77, (4, 1, 0), None, None, None, 1234, 5)
    assert launcher.calls[0] == launcher.calls[1]
    assert (run == launcher) == bool(scratch)


def test_a_line_is_found_however_it_is_broken():
    assert module._has_line(Launcher36, "__call__", module._KNOWN_LAUNCH)
    assert not module._has_line(Launcher36, "__call__", module._KNOWN_CALL)
    assert not module._has_line(Launcher36, "missing", module._KNOWN_LAUNCH)


def test_launchers_that_are_not_known_are_called_by_triton():
    compiled = CompiledKernel.__new__(CompiledKernel)
    vars(compiled).update(module=None, function=77, packed_metadata=(), _run=Recorder())
    assert module._direct(compiled) == (knobs, compiled.run, (77, (), None, None, None))
    compiled._run = lambda *args: None  # of another backend
    assert module._direct(compiled) is None

    class Other(CompiledKernel):
        def __getitem__(self, grid):
            return lambda *args: self.run(*grid, *args)

    other = Other.__new__(Other)
    vars(other).update(module=None, function=77, packed_metadata=(), _run=Recorder())
    assert module._direct(other) is None
    assert module._direct(Launched([])) is None


def test_kernels_of_the_same_sizes_are_looked_up_not_made():
    # Else every call would compile, and what is remembered would grow.
    from midus.ops.headwise_memory import backward_kernels, forward_kernels
    from midus.ops.rms_norm import kernels as rms_norm
    from midus.ops.rotary import kernels as rotary
    from midus.ops.token_step import memory_kernels, product_kernels

    device = torch.device("cpu")
    for make, sizes in (
        (rms_norm._forward_constants, (8, True)),
        (rms_norm._backward_constants, (8, 3, True, True, False, True)),
        (rotary._constants, (4, 2, 8, False)),
        (forward_kernels._forward_constants, (4, 8, 4, 8, 8, 2, False, True, 16)),
        (forward_kernels._cached_constants, (4, 8, 4, 8, 2, False, 16)),
        (backward_kernels._backward_constants, (4, 8, 4, 8, 8, 2, torch.float32)),
        (product_kernels._project_constants, (32, 4, 2, 8, False, True, device)),
        (memory_kernels._read_constants, (4, 8, 4, 8, 2, False, True, 8, device)),
    ):
        assert make(*sizes) is make(*sizes)
        assert isinstance(make(*sizes), Constants)
