"""Caption tokenization: Stanford's PTB tokenizer with Java, a Python stand-in without."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

# Tokens that coco-caption drops after tokenization (pycocoevalcap.tokenizer.ptbtokenizer).
PUNCTUATION = frozenset(
    ["''", "'", "``", "`", "-LRB-", "-RRB-", "-LCB-", "-RCB-", ".", "?", "!", ",", ":", "-", "--"]
) | {"...", ";"}
_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+(?:-\w+)*(?=n't)|n't|'\w+|\w+(?:-\w+)*|\$|%|&")


def java_path() -> str | None:
    """The `java` on this machine, if any."""
    return shutil.which("java")


def tokenize_python(sentences: Sequence[str]) -> list[str]:
    """Words of each sentence, lower case, separated by single spaces, punctuation dropped.

    Agrees with the PTB tokenizer on plain prose (letters, numbers, hyphenated words, n't and 's).
    The PTB tokenizer's special cases (abbreviations with periods, URLs, fractions, brackets) are
    missing. Our own generated captions are plain prose.
    """
    return [" ".join(_WORD.findall(sentence.lower())) for sentence in sentences]


def tokenize_ptb(sentences: Sequence[str], jar: Path) -> list[str]:
    """Words of each sentence by Stanford CoreNLP 3.4.1 (Java), exactly like coco-caption."""
    lines = "\n".join(" ".join(sentence.split()) for sentence in sentences)
    command = [java_path() or "java", "-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer"]
    done = subprocess.run(
        [*command, "-preserveLines", "-lowerCase"],
        input=lines.encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the PTB tokenizer failed: {done.stderr.decode()[-500:]}")
    tokenized = done.stdout.decode().split("\n")[: len(sentences)]
    return [" ".join(w for w in line.split() if w not in PUNCTUATION) for line in tokenized]
