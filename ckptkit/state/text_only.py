"""Extract the text model of a vision-language model: its tensors under its own names, and its config.json."""

from __future__ import annotations

from dataclasses import replace

from ckptkit.errors import Usage, errors_at
from ckptkit.formats import decompress_entries, locate_all_chunks
from ckptkit.models.names.between_families import make_translation
from ckptkit.models.names.sizes import Sizes
from ckptkit.models.names.transformers import TRANSFORMERS
from ckptkit.models.names.weights import JOINED
from ckptkit.models.predictors import mtp_tensor_names
from ckptkit.models.text_model import find_text_model
from ckptkit.state.model import Model
from ckptkit.state.names import refuse_quantized_weights

_OF_IMAGES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def extract_text_model(model: Model) -> Model:
    """Return the text model of a vision-language model.

    Raises `Usage` without a config.json and for a text model, `Unsupported` if transformers has no class for the text
    model, or the weights are quantized.
    """
    if model.companions.config is None:
        hint = "pass --base MODEL, the model that the training began with"
        raise Usage("--text-only needs config.json, but none was found", path=model.part.path, hint=hint)
    refuse_quantized_weights(model.weights, model.config)
    with errors_at(path=model.part.path):  # translate by way of the in-memory names of both models
        text = find_text_model(model.config)
        layout, came_from = locate_all_chunks(decompress_entries(model.layout)), model.weights.came_from
        heads = mtp_tensor_names(layout.tensors, model.config)
        others = {name: tensor for name, tensor in layout.tensors.items() if name not in heads}
        memory = make_translation(None, TRANSFORMERS, Sizes(model.config))(others)
        text_tensors = {new: memory.tensors[old] for new, old in text.names.items() if old in memory.tensors}
        on_hub = make_translation(TRANSFORMERS, None, Sizes(text.config))(text_tensors)
    sources = {name: (name,) for name in heads} | {
        new: tuple(dict.fromkeys(old for name in names for old in memory.came_from[text.names[name]]))
        for new, names in on_hub.came_from.items()
    }
    unused = layout.tensors.keys() - {old for names in sources.values() for old in names}
    weights = replace(
        model.weights,
        layout=replace(
            layout, tensors={name: layout.tensors[name] for name in heads} | on_hub.tensors, blobs={}, keys={}, twins={}
        ),
        came_from={new: JOINED.join(dict.fromkeys(came_from[old] for old in names)) for new, names in sources.items()},
        left_out={**model.weights.left_out, **dict.fromkeys(model.weights.origins_of(unused), "--text-only")},
    )
    files = {name: content for name, content in model.companions.files.items() if name not in _OF_IMAGES}
    companions = replace(model.companions, files=files, config=text.config, absent=())
    kind = f"`{text.config['model_type']}` ({text.config['architectures'][0]})"
    return replace(model, weights=weights, companions=companions, ask_base=None).with_remarks(
        f"kept the text model, a {kind}"
    )
