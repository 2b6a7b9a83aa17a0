"""A small Hugging Face tokenizer, trained and saved as any other."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

START, END = "<s>", "</s>"


def save_tokenizer(root: Path, *, text: str = "the cat sat on the mat ", starts: bool = True, ends: bool = True) -> str:
    """Save a byte-level BPE tokenizer in `root`, which starts texts with `<s>` and cuts them at 4 tokens by default."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[START, END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([text * 10], trainer)
    if starts:
        made.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, made.token_to_id(START))]
        )
    made.enable_truncation(4)
    names = {"bos_token": START} | ({"eos_token": END} if ends else {})
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(root)
    return str(root)
