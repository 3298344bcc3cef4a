"""Every name in torch that curvmon depends on: it exists, its replacement works, and without it a note says so."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import curvmon
from curvmon.graph.taps import tapped_forward
from curvmon.isolation import patches
from curvmon.isolation.collectives import CollectiveError, collectives_refused
from curvmon.isolation.patches import COLLECTIVES, CONVOLUTION_NODE, ERROR_NODE, PATCHES, TABLE
from curvmon.isolation.torch_symbols import MissingError, Symbol

PACKAGE = Path(curvmon.__file__).parent
by_symbol = pytest.mark.parametrize("symbol", TABLE, ids=lambda symbol: symbol.path)
NOT_WAITING = {
    "destroy_process_group", "get_backend", "get_backend_config", "get_global_rank", "get_group_rank",
    "get_process_group_ranks", "get_rank", "get_world_size", "new_subgroups", "shrink_group",
}  # fmt: skip
"""take a group too, and wait for nobody, or call `new_group`, or belong to no training step"""


@pytest.fixture
def patched() -> Iterator[list[str]]:
    """All rows of the table, those for recurrent layers on a GPU among them."""
    importlib.import_module("torch._dynamo")
    with patches.patched([nn.LSTM(2, 2)], {"cpu", "cuda"}) as notes:
        yield notes


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@by_symbol
def test_symbol_exists(symbol: Symbol) -> None:
    assert symbol.owner() is not None
    assert symbol.owner() == Symbol(symbol.path, "", "").owner(), "only the older path exists"
    assert symbol.why and symbol.missing and symbol.versions


def test_nothing_is_missing(patched: list[str]) -> None:
    assert patched == []


def test_nothing_is_missing_after_dynamo_replaced_init() -> None:
    """Dynamo replaces nn.Module.__init__, from which the names of instances' attributes are read."""
    mutation_guard = importlib.import_module("torch._dynamo.mutation_guard")
    mutation_guard.install_generation_tagging_init()
    with patches.patched([], {"cpu"}) as notes:
        assert notes == []


def test_values_are_restored() -> None:
    importlib.import_module("torch._dynamo")
    settings = [symbol for symbol in PATCHES if symbol.replacement is not None]
    before = [symbol.get() for symbol in settings]
    with pytest.raises(KeyError), patches.patched([nn.LSTM(2, 2)], {"cpu", "cuda"}):
        assert all(symbol.get() is not value for symbol, value in zip(settings, before))
        raise KeyError
    assert [symbol.get() for symbol in settings] == before


def autocast_has_no_effect() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16) as context:
        assert (x @ x).dtype == torch.float32
    assert context._enabled


def attention_is_composed() -> None:
    assert torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    x = torch.rand(1, 1, 3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).square().sum(), x, create_graph=True)
    torch.autograd.grad(gradient.sum(), x)


def fastpath_is_off() -> None:
    assert not torch.backends.mha.get_fastpath_enabled()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).eval()
    calls: list[str] = []
    encoder.layers[0].linear1.register_forward_hook(lambda *args: calls.append("linear1"))
    with torch.no_grad():
        encoder(torch.rand(1, 3, 4))
    assert calls == ["linear1"]


def compiled_functions_run_eagerly() -> None:
    compilations: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert not compilations


def setting_is(path: str, value: Any) -> Callable[[], None]:
    def check() -> None:
        assert Symbol(path, "", "").get() == value

    return check


def second_derivative_through_checkpoint(reentrant: bool) -> Callable[[], None]:
    def check() -> None:
        calls: list[int] = []

        def cube(x: Tensor) -> Tensor:
            calls.append(1)
            return x**3

        x = torch.tensor(2.0, requires_grad=True)
        (slope,) = torch.autograd.grad(checkpoint(cube, x, use_reentrant=reentrant), x, create_graph=True)
        assert torch.autograd.grad(slope, x)[0].item() == 12
        assert len(calls) == 1

    return check


def weight_norm_asymmetry(owner: Any) -> float:
    """Of the Hessian of f(v, g) = Σ c (g v / ‖v‖)², relative to its norm."""
    g, coefficients = torch.tensor([[1.3], [0.7]], dtype=torch.float64), torch.arange(6.0, dtype=torch.float64)

    def function(flat: Tensor) -> Tensor:
        v, scale = flat[:6].reshape(2, 3), g * flat[6:].reshape(2, 1)
        return (coefficients.reshape(2, 3) * owner._weight_norm(v, scale, 0) ** 2).sum()

    H = hessian(function, torch.linspace(0.5, 2, 8, dtype=torch.float64))
    return float((H - H.T).norm() / H.norm())


def weight_norm_is_symmetric(module: str) -> Callable[[], None]:
    def check() -> None:
        assert weight_norm_asymmetry(sys.modules[module]) < 1e-12

    return check


def global_hooks_do_not_fire(register: Callable[[Any], Any]) -> Callable[[], None]:
    def check() -> None:
        fired: list[int] = []
        linear, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(hooks, "_global_is_full_backward_hook", None)  # which registering sets for good
            handle = register(lambda *args: fired.append(1))
            linear(x).sum().backward()
            assert fired == [1]
            with patches.patched([], {"cpu"}):
                linear(x).sum().backward()
            assert fired == [1]
            handle.remove()

    return check


def module_has(register: str, attribute: str) -> Callable[[], None]:
    def check() -> None:
        linear = nn.Linear(2, 2)
        assert not linear.__dict__[attribute]
        getattr(linear, register)(lambda *args: None)
        assert len(linear.__dict__[attribute]) == 1
        assert patches.has_forward_hooks(linear) == ("forward" in register)

    return check


class Subclass(nn.Parameter):
    pass


def parameters_keep_their_class() -> None:
    parameter = Subclass(torch.ones(2))
    copy = patches.own_copy_of_parameter(parameter, parameter.data.clone())
    assert type(copy) is Subclass and not copy.requires_grad and copy.data_ptr() != parameter.data_ptr()
    assert copy.requires_grad_().is_leaf


def loader_iterators_are_recognised() -> None:
    assert patches.is_loader_iterator(iter(DataLoader([1, 2])))  # type: ignore[arg-type]
    assert not patches.is_loader_iterator(iter([1, 2]))


def native_functions_are_those_that_are_called() -> None:
    native = patches.NATIVE_FUNCTIONS.get()
    assert native.gelu is F.gelu
    assert all(
        hasattr(native, name) for name in ("silu", "mse_loss", "cross_entropy_loss", "nll_loss_nd", "huber_loss")
    )


def torch_func_is_seen() -> None:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(patches.is_transformed())
        return x.sum()

    torch.func.vmap(function)(torch.ones(2, 2))
    torch.func.grad(function)(torch.ones(2))
    function(torch.ones(2))
    assert seen == [True, True, False]


def forward_mode_is_seen() -> None:
    with forward_ad.dual_level():
        assert patches.is_transformed()
    assert not patches.is_transformed()


def adjoint_of_a_convolution_is_its_gradient() -> None:
    x, weight, g = torch.rand(1, 2, 5, 5, requires_grad=True), torch.rand(3, 2, 3, 3), torch.rand(1, 3, 3, 3)
    geometry = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    backward = patches.CONVOLUTION_BACKWARD.get()
    adjoint = backward(g, torch.zeros(()).expand_as(x), weight, None, *geometry, [True, False, False])[0]
    torch.testing.assert_close(adjoint, torch.autograd.grad(F.conv2d(x, weight), x, g)[0])


def gradients_of_a_normalisation_are_its_gradients(name: str) -> Callable[[], None]:
    def check() -> None:
        x, g = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
        weight, bias, mean, variance = (torch.rand(3, requires_grad=i < 2) for i in range(4))
        if name == "batch":
            y = F.batch_norm(x, mean, variance, weight, bias)
            options = mean, variance, None, None, False, 1e-5, [True, True, True]
            found = patches.BATCH_NORM_BACKWARD.get()(g, x, weight, *options)
        else:
            y, means, rsqrts = torch.native_layer_norm(x, [3], weight, bias, 1e-5)
            found = patches.LAYER_NORM_BACKWARD.get()(g, x, [3], means, rsqrts, weight, bias, [True, True, True])
        torch.testing.assert_close(found, torch.autograd.grad(y, [x, weight, bias], g))

    return check


def gradient_of_a_softmax_is_its_gradient() -> None:
    x, g = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)
    y = x.softmax(-1)
    found = patches.SOFTMAX_BACKWARD.get()(g, y.detach(), -1, x.dtype)
    torch.testing.assert_close(found, torch.autograd.grad(y, x, g)[0])


def versions_count_changes() -> None:
    x = torch.ones(2)
    before = patches.version(x)
    assert before is not None and patches.version(x.add_(1)) == before + 1


def views_have_bases() -> None:
    x = torch.ones(2, 2)
    assert patches.is_view_of(x.view(4), x) and not patches.is_view_of(x.clone(), x)


ALL_REDUCE, BARRIER, ALL_GATHER = dist.all_reduce, dist.barrier, dist.all_gather
"""imported by name"""


def collectives_by_name_are_refused() -> None:
    with collectives_refused(2):
        for call in (lambda: ALL_REDUCE(torch.ones(1)), BARRIER, lambda: ALL_GATHER([torch.ones(1)], torch.ones(1))):
            with pytest.raises(CollectiveError):
                call()


def gradient_sync_is_a_flag(attribute: str) -> Callable[[], None]:
    def check() -> None:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert model.__dict__[attribute] is True

    return check


EFFECTS: dict[str, Callable[[], None]] = {
    "torch.amp.autocast_mode:autocast.__enter__": autocast_has_no_effect,
    "torch.amp.autocast_mode:autocast._enabled": autocast_has_no_effect,
    "torch.nn.attention:sdpa_kernel": attention_is_composed,
    "torch.backends.mha:set_fastpath_enabled": fastpath_is_off,
    "torch.compiler:set_stance": compiled_functions_run_eagerly,
    "torch.backends.cuda:matmul.fp32_precision": setting_is("torch.backends.cuda:matmul.fp32_precision", "ieee"),
    "torch.backends.cudnn:conv.fp32_precision": setting_is("torch.backends.cudnn:conv.fp32_precision", "ieee"),
    "torch.backends.cudnn:rnn.fp32_precision": setting_is("torch.backends.cudnn:rnn.fp32_precision", "ieee"),
    "torch.backends.cudnn:enabled": setting_is("torch.backends.cudnn:enabled", False),
    "torch.utils.checkpoint:CheckpointFunction": second_derivative_through_checkpoint(True),
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator": second_derivative_through_checkpoint(False),
    "torch:_weight_norm": weight_norm_is_symmetric("torch"),
    "torch.nn.utils.weight_norm:_weight_norm": weight_norm_is_symmetric("torch.nn.utils.weight_norm"),
    "torch.nn.modules.module:_global_backward_hooks": global_hooks_do_not_fire(
        hooks.register_module_full_backward_hook
    ),
    "torch.nn.modules.module:_global_backward_pre_hooks": global_hooks_do_not_fire(
        hooks.register_module_full_backward_pre_hook
    ),
    "torch.nn:Module._backward_hooks": module_has("register_full_backward_hook", "_backward_hooks"),
    "torch.nn:Module._backward_pre_hooks": module_has("register_full_backward_pre_hook", "_backward_pre_hooks"),
    "torch.nn:Module._forward_hooks": module_has("register_forward_hook", "_forward_hooks"),
    "torch.nn:Module._forward_pre_hooks": module_has("register_forward_pre_hook", "_forward_pre_hooks"),
    **{
        f"torch.nn.parallel:DistributedDataParallel.{name}": gradient_sync_is_a_flag(name)
        for name in ("require_backward_grad_sync", "require_forward_param_sync")
    },
    "torch:Tensor._make_subclass": parameters_keep_their_class,
    "torch.utils.data.dataloader:_BaseDataLoaderIter": loader_iterators_are_recognised,
    "torch:_C._nn": native_functions_are_those_that_are_called,
    "torch:_C._functorch.peek_interpreter_stack": torch_func_is_seen,
    "torch.autograd.forward_ad:_current_level": forward_mode_is_seen,
    "torch:ops.aten.convolution_backward": adjoint_of_a_convolution_is_its_gradient,
    "torch:ops.aten.native_batch_norm_backward": gradients_of_a_normalisation_are_its_gradients("batch"),
    "torch:ops.aten.native_layer_norm_backward": gradients_of_a_normalisation_are_its_gradients("layer"),
    "torch:ops.aten._softmax_backward_data": gradient_of_a_softmax_is_its_gradient,
    "torch:Tensor._version": versions_count_changes,
    "torch:Tensor._base": views_have_bases,
    "torch.distributed.distributed_c10d:_get_default_group": collectives_by_name_are_refused,
    "torch.distributed.distributed_c10d:_group_or_default_group": collectives_by_name_are_refused,
}


def test_every_symbol_has_a_check() -> None:
    assert EFFECTS.keys() == {symbol.path for symbol in TABLE} and len(EFFECTS) == len(TABLE)


@by_symbol
def test_symbol_behaves_as_expected(symbol: Symbol, patched: list[str], request: pytest.FixtureRequest) -> None:
    if "DistributedDataParallel" in symbol.path:
        request.getfixturevalue("process_group")
    EFFECTS[symbol.path]()


@pytest.mark.parametrize("module", ["torch", "torch.nn.utils.weight_norm"])
def test_fused_weight_norm_is_still_wrong(module: str) -> None:
    """Once torch's second derivative is right, these two rows can go."""
    assert weight_norm_asymmetry(sys.modules[module]) > 1e-3


def test_settings_before_torch_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = next(symbol for symbol in TABLE if "matmul" in symbol.path)
    monkeypatch.setattr(matmul, "path", matmul.path + "_renamed")
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with matmul.patched():
            assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


class Network(nn.Module):
    """Runs the efficient operations, and the code of most rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.head = nn.Conv2d(1, 2, 3), nn.Linear(8, 5), nn.Linear(5, 3)
        self.unused = iter(DataLoader([1, 2]))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.hidden(torch.tanh(self.conv(x)).flatten(1))))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.nll_loss(F.log_softmax(model(batch[0]), -1), batch[1])


def network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Network(), (torch.randn(6, 1, 4, 4), torch.randint(3, (6,)))


def measured(
    target: tuple[nn.Module, tuple[Tensor, Tensor]] | None = None,
) -> tuple[curvmon.Measurement, curvmon.Spectrum]:
    model, batch = target or network()
    return curvmon.measure(model, batch, loss=loss), curvmon.spectrum(model, batch, loss=loss, k=1)


@pytest.fixture(scope="module")
def truth() -> tuple[curvmon.Measurement, curvmon.Spectrum]:
    return measured()


@by_symbol
def test_renamed_symbol_costs_a_note(symbol: Symbol, truth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = f"{symbol.path}_renamed"
    monkeypatch.setattr(symbol, "path", renamed)
    monkeypatch.setattr(symbol, "older", "")
    monkeypatch.setattr(symbol, "applies", lambda target: True)
    for result, expected in zip(measured(), truth):
        new = [note for note in result.notes if note not in expected.notes]
        assert new == [f"torch {torch.__version__} has no {renamed.replace(':', '.')}: {symbol.missing}", *new[1:]]
    measurement, spectrum = measured()
    if symbol is patches.TENSOR_VERSION:  # another output, so other nodes
        assert any("splits at the probabilities" in note for note in measurement.notes)
    else:
        torch.testing.assert_close(measurement.resonance, truth[0].resonance, rtol=1e-4, atol=0)
    assert spectrum.sharpness == pytest.approx(truth[1].sharpness, rel=1e-4)


DELETABLE = [
    "torch.compiler:set_stance",
    "torch.nn.attention:sdpa_kernel",
    "torch.utils.checkpoint:CheckpointFunction",
    "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
    "torch:_weight_norm",
    "torch.nn.utils.weight_norm:_weight_norm",
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "torch.backends.mha:set_fastpath_enabled",
]
"""that torch itself does not need in this network"""


@pytest.mark.parametrize("path", DELETABLE)
def test_deleted_symbol_costs_a_note(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("torch._dynamo")
    symbol = next(symbol for symbol in TABLE if symbol.path == path)
    model, batch = network()
    place = symbol.owner()
    assert place is not None
    monkeypatch.delattr(*place)
    note = symbol.note(MissingError())
    assert note in curvmon.measure(model, batch, loss=loss).notes
    assert note in curvmon.exact(model, batch, loss=loss).notes
    assert note in curvmon.spectrum(model, batch, loss=loss, k=1).notes


def test_changed_symbol_costs_a_note(truth: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another signature, or a setting that is read only."""
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda: None)
    monkeypatch.setattr(torch.nn.attention, "SDPBackend", None)
    for result, expected in zip(measured(), truth):
        new = [note for note in result.notes if note not in expected.notes]
        assert len(new) == 1 and "torch.nn.attention.sdpa_kernel does not behave as expected (TypeError: " in new[0]
    assert torch.equal(measured()[0].resonance, truth[0].resonance)


IRREPLACEABLE = {
    "torch.amp.autocast_mode:autocast.__enter__": "torch.autocast itself fails",
    "torch:_C._nn": "torch.nn.functional itself fails",
    "torch.backends.cuda:matmul.fp32_precision": "torch refuses other values",
    "torch.backends.cudnn:conv.fp32_precision": "torch refuses other values",
    "torch.backends.cudnn:rnn.fp32_precision": "torch refuses other values",
    "torch.backends.cudnn:enabled": "torch refuses other values",
}
NOT_READ = [
    symbol.path
    for symbol in TABLE
    if (symbol.replacement is not None and symbol.context is None)
    or symbol in (*patches.BACKWARD_HOOKS, *patches.FORWARD_HOOKS, *patches.GRADIENT_SYNC)
    or symbol in (patches.AUTOCAST_ENABLED, patches.GROUP_OR_DEFAULT)
]
"""replaced whatever they are, set in each instance, or used by name only"""


@pytest.mark.parametrize("value", [None, "another kind", {}], ids=["None", "string", "dict"])
@by_symbol
def test_symbol_of_another_kind_costs_a_note(
    symbol: Symbol, value: Any, truth: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if symbol.path in IRREPLACEABLE:
        pytest.skip(IRREPLACEABLE[symbol.path])
    place, target = symbol.owner(), network()
    assert place is not None
    monkeypatch.setattr(*place, value, raising=False)
    if symbol not in PATCHES:
        monkeypatch.setattr(symbol, "applies", lambda target: True)
    importlib.import_module("torch._dynamo")
    measurement, spectrum = measured(target)
    name = symbol.path.replace(":", ".")
    start = f"in torch {torch.__version__} {name} does not behave as expected (TypeError: "
    for result, expected in zip((measurement, spectrum), truth):
        new = [note for note in result.notes if note not in expected.notes]
        if symbol.path in NOT_READ:
            assert new == []
        else:
            assert new[0].startswith(start) and new[0].endswith(symbol.missing)
    if symbol is not patches.TENSOR_VERSION:  # another output, so other nodes
        torch.testing.assert_close(measurement.resonance, truth[0].resonance, rtol=1e-4, atol=0)
    assert spectrum.sharpness == pytest.approx(truth[1].sharpness, rel=1e-4)


@pytest.mark.parametrize("symbol", [patches.FUNCTORCH_STACK, patches.FORWARD_LEVEL], ids=lambda symbol: symbol.path)
def test_no_efficient_operations_if_transforms_cannot_be_detected(
    symbol: Symbol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symbol, "path", symbol.path + "_renamed")
    x = torch.ones(2, requires_grad=True)
    graph = tapped_forward([], lambda: torch.tanh(x * 1.0).sum(), batch_dim=0)
    operation = graph.loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert operation is not None and operation.name() == "TanhBackward0"


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_refused(name: str) -> None:
    function = getattr(dist, name)
    with collectives_refused(2):
        with pytest.raises(CollectiveError):
            getattr(dist, name)()
        assert not dist.is_initialized()
    assert getattr(dist, name) is function


def test_no_collective_is_missing_from_the_list() -> None:
    functions = {name: f for name, f in vars(dist).items() if inspect.isfunction(f) and not name.startswith("_")}
    with_group = {name for name, f in functions.items() if "group" in inspect.signature(f).parameters}
    assert with_group - set(COLLECTIVES) - NOT_WAITING == set()


def test_collectives_without_private_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches.DEFAULT_GROUP, "path", patches.DEFAULT_GROUP.path + "_renamed")
    with collectives_refused(2), pytest.raises(CollectiveError):
        dist.all_reduce(torch.ones(1))


def test_names_of_autograd_nodes() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 1

    x = torch.ones(1, requires_grad=True)
    result: Any = Once.apply(x)  # type: ignore[no-untyped-call]
    (gradient,) = torch.autograd.grad(result, x, torch.ones(1, requires_grad=True), create_graph=True)
    assert gradient.grad_fn is not None and gradient.grad_fn.name() == ERROR_NODE
    convolution = F.conv1d(torch.ones(1, 1, 3, requires_grad=True), torch.ones(1, 1, 1)).grad_fn
    assert convolution is not None and CONVOLUTION_NODE in convolution.name()
    leaf: Any = (x * 1).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert leaf.variable is x


PRIVATE_ATTRIBUTES = {
    name
    for owner in (torch.Tensor, nn.Module, nn.Module())
    for name in dir(owner)
    if name.startswith("_") and not name.endswith("__")
}
"""of tensors and modules"""
EXCEPTIONS = {("monitor/process_group.py", "_buffers"), ("metrics/mean_curvature.py", "_apply")}
"""buffers are replaced by those of another process; a metric follows its module to another device"""


def private_uses(source: str) -> list[str]:
    """Private names of torch in a module, and assignments to attributes of torch."""
    tree = ast.parse(source)
    aliases: set[str] = set()
    uses: list[str] = []

    def is_private(name: str) -> bool:
        return name.startswith("_") and not name.endswith("__")

    def root(node: ast.AST) -> str | None:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            aliases.update(alias.asname or "torch" for alias in names)
            uses += [alias.name for alias in names if any(map(is_private, alias.name.split(".")))]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases.update(alias.asname or alias.name for alias in node.names)
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            uses += [part for part in parts if is_private(part)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assigned = not isinstance(node.ctx, ast.Load) and root(node) in aliases
            private = is_private(node.attr) and (root(node) in aliases or node.attr in PRIVATE_ATTRIBUTES)
            if assigned or (private and root(node) != "self"):
                uses.append(node.attr)
        elif isinstance(node, ast.Constant) and node.value in PRIVATE_ATTRIBUTES:
            uses.append(node.value)
        elif isinstance(node, ast.Call) and root(node.func) in ("setattr", "delattr") and root(node.args[0]) in aliases:
            uses.append("setattr")
    return uses


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_uses_private_names_of_torch(path: Path) -> None:
    own = path.relative_to(PACKAGE).as_posix()
    uses = [use for use in private_uses(path.read_text()) if (own, use) not in EXCEPTIONS]
    assert own == "isolation/patches.py" or uses == []


def test_the_check_sees_private_names() -> None:
    source = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter
torch._C._nn
nn.modules.loss._Loss
tensor._version
getattr(tensor, "_base")
dist.barrier = None
setattr(torch.backends.cudnn, "enabled", False)
self._private
"""
    assert sorted(private_uses(source)) == [
        "_BaseDataLoaderIter", "_C", "_Loss", "_base", "_nn", "_version", "barrier", "setattr",
    ]  # fmt: skip
