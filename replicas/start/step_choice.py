"""Chooses what computes a replica's steps: a forward pass of our own where it serves, else transformers'.

Each kind is probed with the weights as it holds them. Where trials show that the first one is not exact and
another one is, that one serves: exact mode promises more than speed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from pydantic import TypeAdapter

from samovar.configs.compiled import INT8_FLAGS, PAIR_FLAGS
from samovar.configs.imports import return_freed_memory
from samovar.configs.json_text import parse_json
from samovar.configs.settings import EngineSettings
from samovar.replicas.engine import TOLERANCES, Probe, ProbeResult
from samovar.replicas.forward import (
    ATTENTION_TOLERANCES,
    PLAIN_TYPES,
    AttentionBackend,
    Forward,
    FusedForward,
    GatherSdpa,
    LeanForward,
    LeanModel,
    MakeForward,
    NotPlain,
    PlainModel,
    StepPacker,
    TransformersForward,
    plain_model,
)
from samovar.replicas.kv import TRASH_PAGE, KvGeometry, KvPool, free_memory_bytes
from samovar.replicas.measurement_cache import MeasurementCache
from samovar.replicas.messages import ModelRefused
from samovar.replicas.model import ModelSpec, in_a_line, is_device_lost
from samovar.replicas.native import (
    BITS_VERSION,
    PAIR_BITS_VERSION,
    NativeStep,
    NotNative,
    build_library,
    numbers_digest,
    packed_bytes,
    pair_variant_here,
    variant_here,
    why_not_native,
)
from samovar.replicas.scheduling import Chunk, bare_sequence
from samovar.replicas.start.checkpoint import PlainRecipe, recipe_of

logger = logging.getLogger(__name__)

AUTO, FUSED, TRANSFORMERS = "auto", "fused", "transformers"
NATIVE_BF16, NATIVE, LEAN = "native-bf16", "native", "lean"
"""Values of `engine.step`."""
INT8 = "int8"
"""Value of `model.weights`."""
PROBE, RECIPE = TypeAdapter(ProbeResult), TypeAdapter(PlainRecipe | None)
"""The forms in which verdicts and recipes are kept."""


class StepForm(Protocol):
    """A model's weights as a kind of step of our own takes them.

    `sentence`: what it is; `attention`: how it attends, if it does not leave that to a backend; `numerics`:
    what tells its bits from those of transformers' modules; `version`: what a verdict on it is of, its
    compiler included; `is_torch`: whether it computes by torch's
    elementwise functions, see `Probe`.
    """

    sentence: str
    attention: str | None
    numerics: str
    version: str
    is_torch: bool

    def forward(self, backend: AttentionBackend, *, exact: bool) -> MakeForward:
        """Return what makes the forward pass of a pool; `backend` attends, if the form leaves that to one."""
        ...


@dataclass(frozen=True, slots=True)
class FormSetup:
    """What forms of weights are made with.

    `native_dir`: of compiled steps; None: there shall be none. `weights`: of `model.weights`.
    """

    settings: EngineSettings
    geometry: KvGeometry
    native_dir: Path | None
    weights: str


def _native_library(
    settings: EngineSettings, native_dir: Path, dtype: torch.dtype, kind: str, flags: tuple[str, ...] = ()
) -> tuple[Path, str]:
    """Compile a kind of native step, if need be; return its library, and for what. Raises `NotNative`."""
    has_pairs = kind == NATIVE_BF16
    if has_pairs and (dtype != torch.bfloat16 or flags):
        weights = INT8 if flags else str(dtype).removeprefix("torch.")
        raise NotNative(f"it multiplies in bfloat16, and the weights are {weights}")
    variant, flags = (pair_variant_here(), PAIR_FLAGS) if has_pairs else (variant_here(), flags)
    wait_s = settings.native_build_s_max
    return build_library(native_dir, variant, dtype, wait_s=wait_s, more_flags=flags), variant.name


class NativeForm:
    """The weights of the native step. Takes `plain` over.

    `kind`: `NATIVE`, or `NATIVE_BF16`, whose matrix products and attention are those of bfloat16 numbers.
    """

    attention: str | None = "native, from pages"
    is_torch = False

    def __init__(self, plain: PlainModel, setup: FormSetup, kind: str = NATIVE) -> None:
        if setup.native_dir is None:
            raise NotNative("it has no folder to be compiled to")
        why_not = why_not_native(plain, setup.geometry.stored_dtype)
        if why_not is not None:
            raise NotNative(why_not)
        is_int8 = setup.weights == INT8
        library, variant = _native_library(
            setup.settings, setup.native_dir, plain.dtype, kind, INT8_FLAGS if is_int8 else ()
        )
        needed, free = packed_bytes(plain, is_int8=is_int8), free_memory_bytes(torch.device("cpu"))
        if needed > free:
            raise NotNative(f"it packs {needed:,} bytes of weights beside the model's, and {free:,} are free")
        self._step = NativeStep(plain, library, torch.get_num_threads(), kind)
        self.probed_layers = layers_of_all_kinds(plain)
        version = PAIR_BITS_VERSION if kind == NATIVE_BF16 else BITS_VERSION
        self.numerics = f"{kind} {version}{' int8' * is_int8} {numbers_digest(plain)}"
        self.version = f"{self.numerics} {library.stem}"
        self.sentence = f"{kind}, compiled for {variant}{', weights in int8' * is_int8}"

    def forward(self, backend: AttentionBackend, *, exact: bool) -> MakeForward:
        return self._step.on

    def first_layers(self) -> MakeForward:
        """Return what makes the forward pass of `probed_layers` alone."""
        return partial(self._step.on, layers=self.probed_layers)


def layers_of_all_kinds(plain: PlainModel) -> int:
    """Return how many first layers have one of each kind among them, and two at least.

    All layers have the same sizes: what one computes differs by which weights it has, rope and window.
    """
    kinds: dict[object, int] = {}
    for number, layer in enumerate(plain.layers):
        has = tuple(getattr(layer, one.name) is not None for one in fields(layer))
        kinds.setdefault((has, layer.uses_rope, layer.window), number)
    return min(len(plain.layers), max(2, 1 + max(kinds.values())))


def expects_native(settings: EngineSettings, spec: ModelSpec, device: torch.device, native_dir: Path) -> bool:
    """Return whether a native step is to be expected for weights in bfloat16; compiles it if need be."""
    kinds = [NATIVE_BF16, NATIVE] if settings.step == AUTO else [settings.step]
    if device.type != "cpu" or spec.model_type not in PLAIN_TYPES:
        return False
    if settings.tensor_parallel > 1 or settings.kv_dtype != "auto":
        return False
    if parse_json(spec.rope).get("partial_rotary_factor", 1) != 1:  # `PlainModel` refuses it
        return False
    for kind in kinds:
        if kind not in (NATIVE_BF16, NATIVE):
            continue
        try:
            _native_library(settings, native_dir, torch.bfloat16, kind)
        except NotNative:
            continue
        return True
    return False


class LeanForm:
    """The weights of the lean step. Takes `plain` over."""

    attention: str | None = None
    is_torch = True

    def __init__(self, plain: PlainModel, setup: FormSetup) -> None:
        self._model = LeanModel(plain)
        packed = self._model.is_packed
        self.sentence = "lean, weights packed" if packed else "lean, weights as they are"
        self.numerics = self.version = "lean packed" if packed else "lean"

    def forward(self, backend: AttentionBackend, *, exact: bool) -> MakeForward:
        model = self._model
        return lambda pool: LeanForward(model, pool, backend, exact=exact)


class FusedForm:
    """The weights of the fused step, on a GPU. Takes `plain` over."""

    attention: str | None = None
    is_torch = True
    sentence = "fused: a kernel between each two matrix products"
    numerics = version = FUSED

    def __init__(self, plain: PlainModel, setup: FormSetup) -> None:
        if setup.settings.exact:
            raise NotFused("engine.exact")
        self._plain = plain

    def forward(self, backend: AttentionBackend, *, exact: bool) -> MakeForward:
        assert not exact, "a row's bits depend on the rows beside it"
        return lambda pool: FusedForward(self._plain, pool, backend)


FORMS: dict[str, Callable[[PlainModel, FormSetup], StepForm]] = {
    FUSED: FusedForm,
    NATIVE_BF16: partial(NativeForm, kind=NATIVE_BF16),
    NATIVE: NativeForm,
    LEAN: LeanForm,
}
"""The kinds of step of our own, those that are preferred first. Raise `NotPlain`, `NotNative`, `NotFused`."""
ON_GPUS = frozenset({FUSED})
"""The kinds that compute there; the others compute on CPU."""


def kinds_of(device: torch.device) -> list[str]:
    """Return the kinds of step that may serve on a device, first the one that is preferred."""
    return [*(kind for kind in FORMS if (kind in ON_GPUS) != (device.type == "cpu")), TRANSFORMERS]


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """What computes the steps. `kind`: of `engine.step`; `sentence`: what it is, and why not another.

    `model`: transformers' module, without weights if `form` holds them, and None if they were read without
    it; `form`: None for its own modules; `weights`: what they were rounded to, if to anything but the dtype.
    """

    kind: str
    sentence: str
    model: torch.nn.Module | None
    form: StepForm | None
    exactness: ProbeResult
    weights: str = ""

    def numerics(self, device: torch.device) -> str:
        """Return what the bits of exact mode depend on: machine, torch version, thread count, kind of step.

        Outside exact mode KV of all machines and of all kinds is interchangeable, if the weights are not
        rounded to other values. What computes without torch has the same bits on all machines, with any
        number of threads.
        """
        if not self.exactness.exact:
            return self.weights
        if self.form is not None and not self.form.is_torch:
            return f"exact {self.form.numerics}"
        cpu, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
        machine = f"exact {device.type} {cpu} torch {torch.__version__} threads {threads}"
        return machine if self.form is None else f"{machine} {self.form.numerics}"

    @property
    def attention(self) -> str | None:
        """How the step attends, in words; None: by the backend."""
        return None if self.form is None else self.form.attention

    def forward(self, backend: AttentionBackend) -> MakeForward | None:
        """Return what makes the forward pass of a pool, attending by `backend`; None: the runner's own."""
        return None if self.form is None else self.form.forward(backend, exact=self.exactness.exact)


class StepChoice:
    """Settles which kind of step serves a model, and whether it is exact here.

    `load`: loads the model; called once, and again if a kind that has taken its weights over does not serve.
    `kept`: verdicts of earlier starts. `native_dir`, `weights`: of `FormSetup`. `directory`: where `load`
    finds the weights, to read them without it once a start has kept how; None: each start loads the model.
    """

    def __init__(
        self,
        settings: EngineSettings,
        geometry: KvGeometry,
        device: torch.device,
        load: Callable[[], torch.nn.Module],
        kept: MeasurementCache,
        native_dir: Path | None = None,
        weights: str = AUTO,
        directory: Path | None = None,
    ) -> None:
        self._setup = FormSetup(settings, geometry, native_dir, weights)
        self._settings = settings
        self._geometry = geometry
        self._device = device
        self._load = load
        self._kept = kept
        self._directory = directory
        self._model: torch.nn.Module | None = None
        self._plain: PlainModel | None = None  # until a form takes it over
        self._form: StepForm | None = None
        self._held: str | None = None
        self._recipe = self._known_recipe()
        self._take_weights()

    def _known_recipe(self) -> PlainRecipe | None:
        """Return how a step of our own reads the weights without transformers, if that is known."""
        ours = self._settings.step not in (FUSED, TRANSFORMERS) and self._settings.tensor_parallel == 1
        if self._directory is None or self._device.type != "cpu" or not ours:
            return None
        return self._kept.get("plain form", RECIPE, self._learn, None)

    def _learn(self) -> PlainRecipe | None:
        """Load the model, and return what reads the very same from its files, if anything does."""
        assert self._directory is not None
        self._model, self._held = self._load(), TRANSFORMERS
        try:
            self._plain = plain_model(self._model)
        except NotPlain:
            return None
        recipe = recipe_of(self._plain)
        return recipe if recipe.gives(self._plain, self._directory) else None

    def _take_weights(self) -> None:
        """Have the weights as they are before a form takes them over."""
        if self._plain is not None or self._model is not None:
            return
        if self._recipe is None or self._directory is None:
            self._model, self._held = self._load(), TRANSFORMERS
        else:
            self._plain = self._recipe.read(self._directory, self._geometry.dtype)

    def settle(self, vocab: int, step_tokens_max: int) -> ChosenStep:
        """Return the first kind that serves and is exact; if trials show that none is, the first that serves.

        Raises `ModelRefused` if `engine.step` or `model.weights` names what does not serve.
        """
        asked: str = self._settings.step
        first, passed = "", dict[str, str]()
        if self._setup.weights == INT8:
            asked = self._only_native(asked)
        for kind in kinds_of(self._device) if asked == AUTO else (asked,):
            why_not = self._hold(kind)
            if why_not is not None:
                passed[kind] = why_not
                continue
            first = first or kind
            exactness = self._exactness(vocab, step_tokens_max)
            if exactness.exact:
                return self._chosen(exactness, passed)
            if not exactness.is_tried:
                break
            passed[kind] = "it is not exact here"
        if not first:
            raise ModelRefused(
                f"engine.step is {asked}, which does not serve here: {passed[asked]}",
                f"set engine.step to {AUTO}",
            )
        self._hold(first)
        return self._chosen(self._exactness(vocab, step_tokens_max), passed)

    def _only_native(self, asked: str) -> str:
        """Return the only kind that has weights in int8. Raises `ModelRefused` if it does not serve."""
        why_not = self._hold(NATIVE) if asked in (AUTO, NATIVE) else f"engine.step is {asked}"
        if why_not is not None:
            raise ModelRefused(
                f"model.weights is {INT8}, which only the native step has: {why_not}",
                f"set model.weights to {AUTO}, or remove what keeps the native step from serving",
            )
        return NATIVE

    def _chosen(self, exactness: ProbeResult, passed: dict[str, str]) -> ChosenStep:
        kind = self._held or TRANSFORMERS
        what = "the modules of transformers" if self._form is None else self._form.sentence
        kinds = kinds_of(self._device)
        before = kinds[: kinds.index(kind)]
        reasons = dict.fromkeys(passed[name] for name in before if name in passed)
        named = {why: [name for name in before if passed.get(name) == why] for why in reasons}
        why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in named.items())
        why = "engine.step" if self._settings.step == kind else why
        rounded = INT8 if self._setup.weights == INT8 else ""
        sentence = f"{what} ({why})" if why else what
        return ChosenStep(kind, sentence, self._model, self._form, exactness, rounded)

    def _hold(self, kind: str) -> str | None:
        """Hold the weights, once, as a kind of step takes them; return why it cannot, or None."""
        if kind == self._held:
            return None
        if kind != TRANSFORMERS and self._settings.tensor_parallel > 1:
            return "engine.tensor_parallel"
        if kind not in kinds_of(self._device):
            return f"the model is on {self._device.type}"
        if self._form is not None:  # it has taken the weights over
            self._form = self._held = self._model = None
        if kind == TRANSFORMERS:
            if self._model is None:
                self._plain = None
                self._model = self._load()
            self._held = TRANSFORMERS
            return None
        self._take_weights()
        try:
            if self._plain is None:
                assert self._model is not None
                self._plain = plain_model(self._model)
            form = FORMS[kind](self._plain, self._setup)
            if kind == FUSED:
                assert self._model is not None, "on a GPU the weights are read by it"
                compare_fused(self._model, self._plain, self._geometry, self._device)
        except (NotPlain, NotNative, NotFused, torch.OutOfMemoryError) as why:
            # The modules compute as before, on views of what has been joined.
            if kind == FUSED:
                logger.warning("steps are not computed by the fused step, which is quicker: %s", why)
            return str(why)
        self._form = form
        self._held, self._plain = kind, None
        if self._model is not None:
            self._model.to("meta")  # who computes with it now gets an error
        return_freed_memory()
        return None

    def _exactness(self, vocab: int, step_tokens_max: int) -> ProbeResult:
        """Decide on exact mode: `engine.exact` requests it (default: on CPU), the probe grants it.

        It is never assumed: a start that does not probe and finds no kept verdict is not exact.
        """
        geometry, wanted, form = self._geometry, self._settings.exact, self._form
        ranks, tolerance = self._settings.tensor_parallel, f"tolerance: {TOLERANCES[geometry.stored_dtype]}"
        if ranks > 1:  # a sum's order depends on where a row lies in the batch
            return ProbeResult(False, f"not bitwise with engine.tensor_parallel={ranks}; {tolerance}")
        if wanted is False or (wanted is None and self._device.type != "cpu"):
            why = "switched off" if wanted is False else f"off by default on {self._device.type}"
            return ProbeResult(False, f"{why}; {tolerance}")
        if geometry.dtype == torch.float16:  # overflows to Inf; sums in different orders then disagree
            return ProbeResult(False, f"not in float16; {tolerance}")
        make = None if form is None else form.forward(GatherSdpa(True, geometry.dtype), exact=True)
        is_torch = form is None or form.is_torch
        if isinstance(form, NativeForm):
            # The same code for each layer, and a probe of all of a large model takes minutes on a CPU.
            geometry, make = replace(geometry, layers=form.probed_layers), form.first_layers()

        def probe() -> ProbeResult:
            if is_torch and self._model is None:  # read without it, and its config is asked
                self._model = self._load().to("meta")
            return Probe(self._model, geometry, vocab, self._device, make, is_torch).run(step_tokens_max)

        unprobed = ProbeResult(False, f"not probed (engine.fast_start); {tolerance}")
        name = "probe" if form is None else f"probe {form.version}"
        return self._kept.get(name, PROBE, probe, unprobed)


STRICT_LAYERS = 2
"""Whose K and V may be as far from the modules' as attention may be: `ATTENTION_TOLERANCES`, relative to
them. Those of the second say what the first one computes."""
LOGITS_OFF_MAX = 5
"""Times the tolerance of a layer: two right ways to round drift apart over a model's layers."""
INT8_TOLERANCE = 2e-2
"""Of vectors in int8: a code that is rounded the other way is a hundredth of the largest number."""
PROMPT, BESIDE, CHUNK = 30, 20, 17
"""Tokens of two prompts, and of a chunk behind the first one."""


class NotFused(Exception):
    """A model that the fused step does not compute here; the message is a sentence that says why."""


def compare_fused(
    model: torch.nn.Module, plain: PlainModel, geometry: KvGeometry, device: torch.device
) -> None:
    """Compare steps of a prompt, a chunk, and decodes, on pages of NaN; compiles what serving will run.

    `plain`: of `model`, and on the same memory. Raises `NotFused` if they differ or if the kernels do not
    run, and what says that the device is lost.
    """
    try:
        _compare(model, plain, geometry, device)
    except NotFused:
        raise
    except ImportError as error:
        raise NotFused(f"triton cannot be imported ({error})") from error
    except Exception as error:  # whatever a compiler may raise
        if is_device_lost(error):
            raise
        raise NotFused(in_a_line(error)) from error


@torch.inference_mode()
def _compare(model: torch.nn.Module, plain: PlainModel, geometry: KvGeometry, device: torch.device) -> None:
    blocks = -(-(PROMPT + CHUNK + 1) // geometry.block_tokens)
    first = bare_sequence(
        _tokens(plain, 2 * PROMPT, 13), list(range(2 * blocks, TRASH_PAGE + 1, -2))[:blocks]
    )
    # In no order, and each sequence's pages beside the other's.
    beside = bare_sequence(_tokens(plain, 2 * BESIDE, 29), [page - 1 for page in first.pages])
    steps = [
        [Chunk(first, 0, PROMPT)],
        [Chunk(beside, 0, BESIDE), Chunk(first, PROMPT, CHUNK)],
        [Chunk(first, PROMPT + CHUNK, 1), Chunk(beside, BESIDE, 1)],
    ]
    backend = GatherSdpa(False, geometry.dtype)
    pools = [KvPool(geometry, 1 + TRASH_PAGE + 2 * blocks, device) for _ in range(2)]
    forwards: list[Forward] = [
        TransformersForward(model, pools[0], backend, exact=False),
        FusedForward(plain, pools[1], backend),
    ]
    for pool in pools:
        pool.page_bytes.fill_(0xFF)  # NaN, wherever no token is
    tolerance = ATTENTION_TOLERANCES[geometry.dtype]
    if geometry.is_int8:
        tolerance = max(tolerance, INT8_TOLERANCE)
    packer = StepPacker(device, geometry.block_tokens)
    for step in steps:
        inputs = packer.pack(step)
        rows = torch.arange(inputs.shape.rows, device=device)
        truth, found = (one.logits(one.hidden(inputs), rows, len(rows)) for one in forwards)
        _check("logits", found, truth, LOGITS_OFF_MAX * tolerance)
    for layer in range(min(STRICT_LAYERS, geometry.layers)):
        for sequence, tokens in ((first, PROMPT + CHUNK + 1), (beside, BESIDE + 1)):
            both = [pool.gather_layer(layer, list(sequence.pages), 0, tokens).float() for pool in pools]
            for name, truth, found in zip("KV", *both, strict=True):
                _check(f"{name} of layer {layer}", found, truth, tolerance)


def _tokens(plain: PlainModel, count: int, first: int) -> list[int]:
    return [(7919 * number + first) % plain.vocab for number in range(count)]


def _check(what: str, found: torch.Tensor, truth: torch.Tensor, tolerance: float) -> None:
    off = ((found - truth).norm() / truth.norm()).item()
    if not off <= tolerance:  # NaN is not, either
        raise NotFused(f"its {what} differ by {off:.2g} of those of transformers' modules")
