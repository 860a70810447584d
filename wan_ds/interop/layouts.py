"""What lies where: a model's components in Wan's original folders and in diffusers', and what is beside."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from wan_ds.errors import CheckpointError
from wan_ds.interop import configs, fitting, names, sampling_notes
from wan_ds.interop.conversion import (
    ORIGINAL_STEMS,
    REST_FOLDER,
    REST_STEM,
    VAE_STEMS,
    Component,
    Listing,
    configuration,
    to_diffusers,
)
from wan_ds.interop.names import Kind
from wan_ds.interop.sampling_notes import INDEX, Sampling
from wan_ds.interop.tensor_files import TensorFiles, open_tensor_files, read_object

ROLES = ("transformer", "transformer_2", "vae", "text_encoder", "image_encoder")  # diffusers' subfolders
EXPERTS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}  # original subfolders
TOKENIZER = PurePosixPath("google/umt5-xxl")
CLIP_TOKENIZER = PurePosixPath("xlm-roberta-large")  # the original code loads it with CLIP, and never uses it
WEIGHTS = (".safetensors", ".pth")

_STARTS = {
    "vae": tuple(VAE_STEMS.values()),
    "text_encoder": ("models_t5",),
    "image_encoder": ("models_clip",),
}


@dataclass(frozen=True)
class Found:
    """What a source holds."""

    components: list[Component]
    is_whole: bool  # a model's folder, and not one component
    copies: dict[PurePosixPath, Path] = field(default_factory=dict)  # folders: place in the target, source
    remarks: list[str] = field(default_factory=list)  # what a person should know
    sampling: Sampling = field(default_factory=dict)  # what the source itself says of it

    @property
    def layout(self) -> str:
        """original or diffusers."""
        return self.components[0].kind.layout

    @property
    def is_dual(self) -> bool:
        """Whether there are two experts: whether there is a second transformer, and nothing else."""
        return any(component.role == "transformer_2" for component in self.components)


def find(source: Path) -> Found:
    """The components of a model's folder in either layout, or the one component of a file or folder.

    Reads headers and configurations. Raises CheckpointError, saying what was looked for, if a component is
    missing, not whole, in another layout than the rest, or of another model.
    """
    if (source / INDEX).is_file() or (source / "transformer").is_dir():
        found = _whole_diffusers(source)
    elif any((source / folder).is_dir() for folder in EXPERTS.values()) or _is_whole_original(source):
        found = _whole_original(source)
    else:
        found = Found([component_at(source)], is_whole=False)
    for component in found.components:
        if component.kind.layout != found.layout:
            raise CheckpointError(
                f"{component.source.where}: is in {component.kind.layout} layout, and "
                f"{found.components[0].source.where} in {found.layout}; convert them one by one"
            )
    if found.is_whole:
        fitting.refuse_mixture({one.role: (one.source.where, one.config) for one in found.components})
    return found


def component_at(path: Path, role: str | None = None) -> Component:
    """The component that a folder or file holds; of the kind that ``role`` says, if it is given.

    Raises CheckpointError if the tensors are not those of a whole Wan component.
    """
    files = open_tensor_files(path)
    kind = names.kind_of(files.tensors, str(path))
    expected = (role or kind.component).removesuffix("_2")
    if kind.component != expected:
        raise CheckpointError(f"{path}: should be the {expected}, but holds a {kind.component}")
    sources = [files]
    rest = path / REST_FOLDER / f"{REST_STEM}.safetensors"
    if kind == Kind("image_encoder", "diffusers") and rest.is_file():
        sources.append(open_tensor_files(rest))
    beside = _beside(path, files, kind)
    config, prefix = _config(path, files, kind, beside)
    return Component(kind, role or kind.component, Listing.of(*sources), config, prefix)


def _config(
    path: Path, files: TensorFiles, kind: Kind, beside: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """The configuration in diffusers' layout, checked against the tensors, and the prefix of CLIP's names."""
    tensors, prefix = files.tensors, names.image_encoder_prefix(files.tensors)
    config = beside
    if kind.layout == "original":
        prefix, config = beside.get("prefix", names.VISION), beside.get("config", beside)
        if prefix not in ("", names.VISION) or not isinstance(config, dict):
            raise CheckpointError(
                f"{path}: the note beside is none that a conversion writes: prefix={prefix!r}, config="
                f"{str(config)[:40]}; move it away"
            )
        try:
            made = to_diffusers(kind, files, prefix)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        tensors = {name: one.stored for name, one in made.items()}
    if not fitting.is_of(kind.component, config):
        config = {}
    if kind.component == "transformer":
        config = configs.transformer_config(tensors, config, str(path))
    elif not config:
        derive = {"vae": configs.vae_config, "text_encoder": configs.text_encoder_config}
        config = derive.get(kind.component, configs.image_encoder_config)(tensors, str(path))
    fitting.refuse_misfits(kind.component, config, tensors, str(path))
    return dict(config), prefix


def _beside(path: Path, files: TensorFiles, kind: Kind) -> dict[str, Any]:
    """The content of the configuration that lies with the weights, if one does."""
    held = list(files.files)
    folder = path if path.is_dir() else path.parent
    is_note = kind.layout == "original" and kind.component != "transformer"
    place = held[0].with_suffix(".json") if is_note else folder / "config.json"
    return read_object(place) if place.is_file() else {}


def _whole_diffusers(source: Path) -> Found:
    present = [role for role in ROLES if (source / role).is_dir()]
    if "transformer" not in present:
        raise CheckpointError(f"{source}: is laid out as diffusers' pipelines are, but has no transformer/")
    _refuse_other_experts(source, present)
    components = [component_at(source / role, role) for role in present]
    copies = {
        TOKENIZER: source / "tokenizer",
        CLIP_TOKENIZER: source / "image_encoder" / REST_FOLDER / CLIP_TOKENIZER,
    }
    sampling = sampling_notes.of_diffusers(source, "transformer_2" in present)
    found = Found(components, True, _there(copies), sampling=sampling)
    _remark_missing(found, source)
    found.remarks.extend(sampling_notes.remarks(sampling, components[0].config, found.is_dual))
    held = {name for component in components for name in component.source.tensors}
    if "image_encoder" in present and "log_scale" not in held:
        found.remarks.append(
            f"{source / 'image_encoder'} has no text half of CLIP ({REST_FOLDER}/{REST_STEM}.safetensors): "
            "the original code will not load what is written; programs that need the vision half alone will"
        )
    return found


def _refuse_other_experts(source: Path, present: list[str]) -> None:
    """The pipeline's index says whether there are two experts; a folder may be lost, or be left over."""
    if not (source / INDEX).is_file():
        return
    named = read_object(source / INDEX).get("transformer_2")
    is_named = isinstance(named, list) and any(named)
    if is_named and "transformer_2" not in present:
        raise CheckpointError(
            f"{source}: {INDEX} names transformer_2, and there is no transformer_2/; the model needs both "
            f"experts: download it again. To convert the one alone: source={source / 'transformer'}"
        )
    if "transformer_2" in present and not is_named:
        raise CheckpointError(
            f"{source}: has transformer_2/, and {INDEX} names no transformer_2; move the folder away, or "
            "name it there"
        )


def _there(copies: Mapping[PurePosixPath, Path]) -> dict[PurePosixPath, Path]:
    return {place: folder for place, folder in copies.items() if folder.is_dir()}


def _is_whole_original(source: Path) -> bool:
    if not source.is_dir():
        return False
    files = [path for path in source.iterdir() if path.suffix in WEIGHTS]
    known = [path for path in files if path.name.startswith(tuple(sum(_STARTS.values(), ())))]
    return bool(known) and any(path.suffix == ".safetensors" for path in set(files) - set(known))


def _whole_original(source: Path) -> Found:
    places = {role: source / folder for role, folder in EXPERTS.items() if (source / folder).is_dir()}
    if len(places) == 1:
        here = next(iter(places.values()))
        absent = next(folder for folder in EXPERTS.values() if folder != here.name)
        raise CheckpointError(
            f"{source}: has {here.name}/ but no {absent}/; the model needs both. To convert the one alone: "
            f"source={here}"
        )
    places = places or {"transformer": source}
    for role, starts in _STARTS.items():
        files = [
            path
            for path in sorted(source.iterdir())
            if path.suffix in WEIGHTS and path.name.startswith(starts)
        ]
        wanted = [path for path in files if path.stem in (ORIGINAL_STEMS.get(role), *VAE_STEMS.values())]
        if len(files) > 1 and len(wanted) != 1:
            listing = ", ".join(path.name for path in files)
            raise CheckpointError(
                f"{source}: several files for the {role} ({listing}); move all but one away"
            )
        if files:
            places[role] = (wanted or files)[0]
    copies = {
        PurePosixPath("tokenizer"): source / TOKENIZER,
        PurePosixPath("image_encoder") / REST_FOLDER / CLIP_TOKENIZER: source / CLIP_TOKENIZER,
    }
    found = Found(
        [component_at(place, role) for role, place in places.items()],
        True,
        _there(copies),
        sampling=sampling_notes.of_original(source, "transformer_2" in places),
    )
    _remark_missing(found, source)
    return found


def _remark_missing(found: Found, source: Path) -> None:
    wanted = ["vae", "text_encoder"]
    if found.components[0].config["image_dim"] is not None:
        wanted.append("image_encoder")
    missing = [role for role in wanted if role not in {component.role for component in found.components}]
    if not any(folder.name in ("tokenizer", TOKENIZER.name) for folder in found.copies.values()):
        missing.append("tokenizer")
    if missing:
        found.remarks.append(f"{source} has no {', no '.join(missing)}, and neither has what is written")


def place_of(component: Component, found: Found) -> PurePosixPath:
    """The folder in the target for a component's weights."""
    if not found.is_whole:
        return PurePosixPath()
    if found.layout == "original":
        return PurePosixPath(component.role)
    is_expert = found.is_dual and component.role in EXPERTS
    return PurePosixPath(EXPERTS[component.role]) if is_expert else PurePosixPath()


def surroundings(found: Found, source: Path) -> dict[PurePosixPath, dict[str, Any]]:
    """The JSON files of the target by their places: configurations, and what makes a diffusers pipeline."""
    files = {}
    for component in found.components:
        name, content = configuration(component)
        files[place_of(component, found) / name] = content
    if found.is_whole and found.layout == "original":
        return files | _of_a_pipeline(found, is_480p="480p" in source.resolve().name.lower())
    if found.sampling:
        files[PurePosixPath(sampling_notes.NOTE)] = found.sampling
    return files


def _of_a_pipeline(found: Found, is_480p: bool) -> dict[PurePosixPath, dict[str, Any]]:
    """Index, scheduler and image processor of a diffusers pipeline: as the source says, else the official."""
    transformer, files = found.components[0].config, {}
    parts = {component.role for component in found.components} | {"scheduler"}
    if PurePosixPath("tokenizer") in found.copies:
        parts.add("tokenizer")
    if "image_encoder" in parts:
        parts.add("image_processor")
        encoder = next(one.config for one in found.components if one.role == "image_encoder")
        processor = found.sampling.get("image_processor") or configs.image_processor_config(encoder)
        files[sampling_notes.PROCESSOR] = processor
    scheduler = found.sampling.get("scheduler") or configs.scheduler_config(
        configs.official_shift(transformer, found.is_dual, is_480p)
    )
    index = configs.model_index(transformer, parts)
    index["scheduler"] = ["diffusers", scheduler.get("_class_name", index["scheduler"][1])]
    index["boundary_ratio"] = found.sampling.get("boundary_ratio", index["boundary_ratio"])
    return files | {sampling_notes.SCHEDULER: scheduler, PurePosixPath(INDEX): index}
