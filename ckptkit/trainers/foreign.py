"""Model files of other programs that are not PyTorch checkpoints, and hints how to load them.

They count only in a directory without a checkpoint, since such files also occur beside checkpoints.
"""

from __future__ import annotations

from ckptkit.trainers.trainer import Unread

# Sources: ggml-org/llama.cpp, gguf-py; keras-team/keras, src/saving/saving_lib.py; NVIDIA-NeMo/NeMo,
# nemo/core/connectors/save_restore_connector.py; coreweave/tensorizer; NVIDIA/TensorRT-LLM, `rank0.engine`;
# sgl-project/sglang, `PreshardedModelLoader` and model_loader/expert_pack; NovaSky-AI/SkyRL, whose Tinker server keeps
# tar files of adapters.
FOREIGN = {
    r".*\.gguf": Unread(
        "a model of llama.cpp, in GGUF", "load it with transformers' `gguf_file=`, then `save_pretrained`"
    ),
    r".*\.nemo": Unread("an archive of NeMo 1", "run `tar xf` on it, and pass the directory"),
    r"model-[0-9]{5}-(common|rank-[0-9,]+)\.safetensor": Unread(
        "weights as SGLang's ranks hold them (presharded)", "take the model that it was made of"
    ),
    r".*\.expert-pack": Unread("experts as SGLang reads them from a disk (expert pack)", "take the model in GGUF"),
    r".*\.keras": Unread("a model of Keras", "load it with Keras, and save its weights as safetensors"),
    r".*\.h5": Unread("weights of Keras, in HDF5", "load them with Keras, and save them as safetensors"),
    r".*\.tensors": Unread(
        "tensors of CoreWeave's tensorizer", "load them with `TensorDeserializer`, and save them as safetensors"
    ),
    r".*\.(engine|plan)": Unread("an engine of TensorRT, built for one GPU", "take the model that it was built from"),
    r"\.snapshot_metadata": Unread(
        "a snapshot of torchsnapshot, which ckptkit stopped reading in 0.1",
        "load it with torchsnapshot, and save it again with torch.distributed.checkpoint",
    ),
    r"model_[0-9]{8}\.bin": Unread(
        "a model of llm.c, which ckptkit stopped reading in 0.1", "convert it with llm.c's dev/eval/export_hf.py"
    ),
    r".*\.(tar|tar\.gz|tgz)": Unread(
        "an archive, such as a Tinker server keeps", "run `tar xf` on it, and pass the directory"
    ),
}
