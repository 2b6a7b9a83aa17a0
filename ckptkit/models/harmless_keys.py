"""Keys of config.json that do not change what a model computes for given tokens and tensors.

Source: the modeling code of transformers 5.23, in which each pattern was searched. A key counts unless it is here.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# keys, by their last name, that no model reads when it computes, or that shapes determine
_HARMLESS = re.compile(
    "|".join(
        (
            r"_(name_or_path|commit_hash|auto_class|class_name|from_(auto|pipeline|model_config)|num_labels)",
            r"_(attn|experts)_implementation(_internal|_autoset)?|_flash_attn_2_enabled|_output_attentions",
            r"name_or_path|model_name|base_model_(name_or_path|prefix)|unsloth_(fixed|version)",
            r"_?(transformers|peft|diffusers|torch|sentence_transformers)_version|(tokenizer|processor)_class",
            r"(torch_)?dtype|use_bfloat16|torchscript",
            # sizes of the values before training; `init_trk_keep_alive` of SAM 3 is none
            r"init(ializer)?_(?!trk_keep_alive).*|.*_init|.*_init_(std|scale|value|method)|rescale_prenorm_residual",
            # ESM scales embeddings by `token_dropout`; SpeechT5 drops elements in inference, too
            r"(?!token_dropout|speech_decoder_prenet_dropout).*drop_?out.*",
            r".*_pdrop|.*drop_path.*|.*layer_?drop|gradient_checkpointing",
            r".*_loss|.*_loss_.*|seq_aux|(router|input)_jitter_noise|label_smoothing|ignore_index",
            r"apply_spec_augment|mask_(time|feature)_(prob|length|min_masks)|ctc_zero_infinity",
            r"return_dict|use_return_dict|output_(attentions|hidden_states|router_logits|scores)",
            r"use_cache|cache_implementation|(.*_)?attn_implementation|use_flash_attn.*|pretraining_tp|ep_size",
            r"chunk_size_feed_forward|.*_[tp]p_plan",
            r"(bos|eos|pad|sep|cls|unk|mask|forced_bos|forced_eos)_token(_id)?|(begin_)?suppress_tokens",
            r"max_length|min_length|do_sample|early_stopping|num_beam.*|diversity_penalty|temperature|top_p|typical_p",
            r".*(repetition|length)_penalty|(encoder_)?no_repeat_ngram_size|bad_words_ids|num_return_sequences",
            r"id2label|label2id|problem_type|finetuning_task|task_specific_params",
            r"vocab_size|max_position_embeddings|n_positions|n_ctx|seq_length|(model_)?max_(sequence|seq)_?len(gth)?",
            r"num_nextn_predict_layers|.*mtp.*",  # MTP layers, which predict further tokens
            # where timm's `pretrained_cfg` found the weights (timm/models/_pretrained.py), and settings of a training
            r"hf_hub_(id|filename)|origin_url|paper_(ids|name)|push_to_hub|repo_id",
            r"optimizer_(lr|lr_backbone|betas|eps|weight_decay|grad_clip_norm)|scheduler_(warmup|decay)_(steps|lr)",
        )
    )
)
# harmless keys that some models read when they compute: patterns of their model types and classes
_READ_BY = {
    "_class_name": re.compile("None"),  # the model's class in diffusers, whose configs have no `model_type`
    # classifiers find the last token; models like RoBERTa count positions from it; others embed it
    "pad_token_id": re.compile(
        r".*(Classification|Reward|Roberta|Electra|Camembert).*|.*(roberta|electra|camembert|seamless_m4t|gemma4).*|"
        r"(esm|evolla|altclip|bridgetower|clap|kosmos|longformer|big_bird|led|layoutlmv3|pp_doclayout).*|ibert|"
        r"data2vec-text|fsmt|lilt|luke|markuplm|m2m_100|nllb-moe|speech_to_text|speecht5|trocr|xmod|udop|splinter|"
        r"t5gemma.*|embedding_gemma.*|neomme|cohere_compass|musicgen.*|pix2struct.*|encoder-decoder|prophetnet|xglm"
    ),
    # text towers and classifiers take the features of this token; n-grams end at it
    "eos_token_id": re.compile(
        r".*clip.*|aimv2.*|groupvit.*|clvp.*|esmfold.*|qwen4_exp.*|"
        r"(Bart|MBart|PLBart|Mvp|LED|BigBirdPegasus|T5|MT5|UMT5)ForSequenceClassification"
    ),
    "bos_token_id": re.compile(r"clvp.*|esmfold.*|rag|t5gemma2.*"),
    "sep_token_id": re.compile(r"big_bird|longformer"),
    "mask_token_id": re.compile(r"esm.*|evolla.*|flaubert|xlm"),
    # positions beyond it are clipped; Qwen scales the attention beyond it
    "max_position_embeddings": re.compile(r"deberta.*|sew-d|mra"),
    "seq_length": re.compile(r"qwen"),
    "n_ctx": re.compile(r"codegen"),
    "temperature": re.compile(r"tapas"),
    "router_jitter_noise": re.compile(r"phimoe"),
}


def is_harmless(key: str, readers: Collection[str]) -> bool:
    """Return whether a key does not change what a model computes.

    `readers` are the types and classes of the model: `model_type` and `architectures` of the config.
    """
    read_by = _READ_BY.get(key)
    if read_by is not None and any(map(read_by.fullmatch, readers)):
        return False
    return _HARMLESS.fullmatch(key) is not None
