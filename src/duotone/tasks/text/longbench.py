"""LongBench (Bai et al. 2024, arXiv 2308.14508): subsets, their prompts and answer lengths.

Seven subsets are those of XQuant's Table 3 (hotpotqa, 2wikimqa, musique, trec, triviaqa, samsum,
passage_count). Five more are KIVI's (qasper, qmsum, multi_news, lcc, repobench-p). The last two are
multifieldqa_en and gov_report. The Chinese subsets need a word splitter and are left out. Prompts
and limits are the benchmark's (MIT, THUDM/LongBench), as in lm-evaluation-harness 5.0: no chat
template.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..task import Example

FIELDS = {"context": str, "answers": list}
_PLACE = re.compile(r"\{(question|context)\}")


@dataclass(frozen=True)
class Subset:
    """One data set of the benchmark; `prompt` has {context} and {question}."""

    prompt: str
    metric: str
    max_new_tokens: int
    stop: tuple[str, ...] = ()

    def example(self, name: str, row: Mapping[str, Any]) -> Example:
        """A row {"context", "input" or "question", "answers", "all_classes"} -> prompt."""
        texts = {"question": row.get("question", row.get("input")) or "", "context": row["context"]}
        # One pass: the texts may hold braces of their own.
        prompt = _PLACE.sub(lambda place: texts[place[1]], self.prompt)
        classes = tuple(row.get("all_classes") or ())
        if self.metric == "classes" and not classes:
            raise ValueError(
                f'each row must have "all_classes": [texts], got {sorted(row)} in {name}; '
                "is this the file of another subset?"
            )
        return Example(name, (), prompt, tuple(row["answers"]), rivals=classes)


_ANSWER_ONLY = "Only give me the answer and do not output any other words."
_FROM_PASSAGES = f"Answer the question based on the given passages. {_ANSWER_ONLY}"
_UNANSWERABLE = (
    "using a single phrase or sentence if possible. If the question cannot be answered based on "
    'the information in the article, write "unanswerable". If the question is a yes/no question, '
    'answer "yes", "no", or "unanswerable". Do not provide any explanation.\n\n'
)

_PASSAGES = (
    f"{_FROM_PASSAGES}\n\nThe following are given passages.\n{{context}}\n\n{_FROM_PASSAGES}\n\n"
    "Question: {question}\nAnswer:"
)
_ARTICLE = (
    "You are given a scientific article and a question. Answer the question as concisely as you "
    f"can, {_UNANSWERABLE}Article: {{context}}\n\n Answer the question based on the above article "
    f"as concisely as you can, {_UNANSWERABLE}Question: {{question}}\n\nAnswer:"
)
_BRIEFLY = (
    "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
    "question based on the above text, only give me the answer and do not output any other words."
    "\n\nQuestion: {question}\nAnswer:"
)
_REPORT = (
    "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
    "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"
)
_MEETING = (
    "You are given a meeting transcript and a query containing a question or instruction. Answer "
    "the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based "
    "on the above meeting transcript in one or more sentences.\n\nQuery: {question}\nAnswer:"
)
_NEWS = (
    "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
    "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:"
)
_TYPE = (
    "Please determine the type of the question below. Here are some examples of questions.\n\n"
    "{context}\n{question}"
)
_TRIVIA = (
    f"Answer the question based on the given passage. {_ANSWER_ONLY} The following are some "
    "examples.\n\n{context}\n{question}"
)
_DIALOGUE = (
    "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
    "{context}\n{question}"
)
_COUNT = (
    "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
    "Please carefully read these paragraphs and determine how many unique paragraphs there are "
    "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
    "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
    "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on.\n\n"
    "The final answer is:"
)
_CODE = "Please complete the code given below. \n{context}{question}Next line of code:"

SUBSETS = {
    "hotpotqa": Subset(_PASSAGES, "qa_f1", 32),
    "2wikimqa": Subset(_PASSAGES, "qa_f1", 32),
    "musique": Subset(_PASSAGES, "qa_f1", 32),
    "qasper": Subset(_ARTICLE, "qa_f1", 128),
    "multifieldqa_en": Subset(_BRIEFLY, "qa_f1", 64),
    "triviaqa": Subset(_TRIVIA, "qa_f1", 32, stop=("\n",)),
    "trec": Subset(_TYPE, "classes", 64, stop=("\n",)),
    "samsum": Subset(_DIALOGUE, "rouge_l", 128, stop=("\n",)),
    "gov_report": Subset(_REPORT, "rouge_l", 512),
    "qmsum": Subset(_MEETING, "rouge_l", 512),
    "multi_news": Subset(_NEWS, "rouge_l", 512),
    "passage_count": Subset(_COUNT, "count", 32),
    "lcc": Subset(_CODE.replace("{question}", ""), "code_similarity", 64),
    "repobench-p": Subset(_CODE, "code_similarity", 64),
}
