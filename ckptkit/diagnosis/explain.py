"""Explain the error of a failed load by what the checkpoint contains."""

from __future__ import annotations

import re
from functools import partial

from ckptkit.checkpoints.checkpoint import Checkpoint, Source
from ckptkit.diagnosis.choose_fixes import choose_fixes, dry_run_fix
from ckptkit.diagnosis.doctor import open_load_target
from ckptkit.diagnosis.explanations import MatchedMessage
from ckptkit.diagnosis.finding import Finding
from ckptkit.diagnosis.messages import MESSAGES

_MAX_CHARACTERS = 1 << 20  # searched characters: logs of many ranks repeat the same text
# lines of source code in a traceback: they contain the templates of messages
_SOURCE = re.compile(r"^(\[rank\d+\]:\s?)?    .*$", re.MULTILINE)


def explain(error: BaseException | str, ckpt: Source) -> tuple[Finding, ...]:
    """Return what the error of a failed load means, which part of the checkpoint it is about, and commands that fix it.

    ckptkit knows messages of torch, transformers and others. It searches `error` and its causes. Returns () for any
    other error. Raises a `CkptError` if there is no checkpoint at `ckpt`.
    """
    texts = [error] if isinstance(error, str) else []
    cause = None if isinstance(error, str) else error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        texts += [f"{type(cause).__name__}: {cause}", *getattr(cause, "__notes__", ())]
        cause = cause.__cause__ or cause.__context__
    text = _SOURCE.sub("", "\n".join(texts)[:_MAX_CHARACTERS])
    checkpoint = Checkpoint.open(ckpt)
    case, findings = open_load_target(checkpoint)
    meanings: list[Finding] = []
    for message in MESSAGES:
        for parts in dict.fromkeys(match.groups() for match in message.pattern.finditer(text)):
            findings += message.look(MatchedMessage(parts, text), case) if message.look and case else ()
            meanings.append(Finding(message.code, None, message.means))  # if the checkpoint shows no cause
    return choose_fixes(findings or meanings, checkpoint, partial(dry_run_fix, checkpoint=checkpoint))[0]
