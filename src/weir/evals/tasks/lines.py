"""`lines`: LongEval's line retrieval, with its official files or cases in their format.

SubGen (Zandieh et al. 2024), section 3.2 and Table 1: a record of lines "line torpid-kid:
REGISTER_CONTENT is <2416>", followed by a question for the number of one of them; accuracy is
compared with the size of the cache. A model without a chat template cannot be asked in words, so it
is given the beginning of the line again, as LongEval does for such models.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from weir.evals.answers import ask_all, costs
from weir.evals.records import read_records
from weir.evals.scores import count_right
from weir.evals.task import Better, Progress, Subject, Task, task
from weir.pools import Bounds, Count

SAMPLES = 50
"""Default number of questions, the same as in an official file."""
LARGEST = 50_000
"""The number in a generated line is from 1 to this, as in the official files."""


@dataclass(frozen=True)
class LineQuestion:
    """One question: the record of lines with the question, the line's name, and its number."""

    prompt: str
    name: str
    number: int


@task("lines")
@dataclass(frozen=True)
class Lines(Task):
    """Measures LongEval's line retrieval; nano cannot read the format.

    Attributes:
        file: an official file, such as `200_lines.jsonl`, or a data set of the Hub, `hub:ID:SPLIT`;
            none generates cases in that format.
        lines: number of lines of each generated case.
        samples: number of questions; the first ones of a file.
        chat: ask in words through the model's chat template. Otherwise, the model has to complete
            the line that is asked for.
    """

    file: str | None = None
    lines: Annotated[int, Bounds(1, NAMES)] = 20
    samples: Count = SAMPLES
    chat: bool = False

    metrics: ClassVar[dict[str, Better]] = {"accuracy": "higher"}

    def run(self, subject: Subject, progress: Progress) -> dict[str, Any]:
        """Ask every question on its own stream.

        Returns:
            "accuracy" with "right", "asked", "low" and "high" (the ends of its 95 % interval); the
            "answers"; and the figures of `costs`.
        """
        cases = self.cases(subject.seed)
        prompts = [
            case.prompt if self.chat else f"{case.prompt}\n{line_start(case.name)}"
            for case in cases
        ]
        most, stops = (100, ()) if self.chat else (15, (">",))
        answers = ask_all(subject, prompts, most, stops, self.chat, progress)
        texts = [one.text for one in answers]
        right = sum(
            number_in(text, last=self.chat) == case.number
            for text, case in zip(texts, cases, strict=True)
        )
        return {**count_right(right, len(cases)), "answers": texts, **costs(answers)}

    def cases(self, seed: int) -> list[LineQuestion]:
        """Read or generate the questions."""
        if self.file is None:
            draw = random.Random(seed)
            return [make_case(self.lines, draw) for _ in range(self.samples)]
        found = []
        for record in read_records(self.file, self.samples):
            number = record.count("expected_number")
            line = record.text("correct_line")
            match = LINE.match(line)
            if match is None or int(match["number"]) != number:
                raise record.wrong(
                    "correct_line", f"must be a line with the number {number}, got {line!r}"
                )
            found.append(LineQuestion(record.text("prompt"), match["name"], number))
        return found


LINE = re.compile(r"line (?P<name>\S+): REGISTER_CONTENT is <(?P<number>\d+)>")


def line_name(number: int) -> str:
    """Return one of the `NAMES` names of lines, like "quiet-lamp"."""
    return f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}"


def line_start(name: str) -> str:
    """Return the beginning of a line, up to the number."""
    return f"line {name}: REGISTER_CONTENT is <"


def number_in(text: str, last: bool) -> int | None:
    """Return the last number in a text if `last`, and otherwise the first; None if it has none.

    LongEval uses the last one for answers in words.
    """
    found = re.findall(r"[0-9]+", text)
    return int(found[-1 if last else 0]) if found else None


def make_case(lines: int, draw: random.Random) -> LineQuestion:
    """Make a random case in LongEval's format."""
    names = [line_name(i) for i in draw.sample(range(NAMES), lines)]
    numbers = [draw.randint(1, LARGEST) for _ in names]
    asked = draw.randrange(lines)
    record = "\n".join(f"{line_start(n)}{x}>" for n, x in zip(names, numbers, strict=True))
    prompt = (
        "Remember the following lines. Each of them has a name and, at its end, a number between "
        f"angle brackets.\n\n{record}\n\nThese were the lines. Which number is the "
        f"<REGISTER_CONTENT> of the line {names[asked]}? Answer with the number alone."
    )
    return LineQuestion(prompt, names[asked], numbers[asked])


ADJECTIVES = """able amber ample ancient arid autumn bold brave brief bright brisk broad calm candid
    careful cheerful clean clear clever cold cool cosy crisp curious daring deep dim distant dusty
    eager early easy elder empty even fair faint famous fine firm fond frank fresh gentle glad
    golden grand green gray happy hardy hollow honest humble idle keen kind large late light lively
    lonely loud loyal lucky mellow merry mild misty modest narrow neat noble odd old open pale
    patient plain proud quick quiet rapid rare ready rich ripe round royal sharp shy silent silver
    simple slow small smooth sober soft solid steady stern still stout strange sunny sweet swift
    tall tame tender thick thin tidy tiny true vast vivid warm wary wide wild wise young""".split()
NOUNS = """acorn anchor apple arrow badger barn basket beacon beaver bell birch blanket boat bottle
    branch bridge brook brush bucket button cabin candle canoe carpet castle cedar chair cherry
    chimney clock cloud coast compass copper corner cottage crane cradle cricket crow curtain
    daisy dawn desert door drum eagle engine falcon feather fence ferry field finch flame flute
    forest fountain fox garden gate glacier glove goose grove hammer harbour hare harvest hedge
    heron hill horse island jacket jar kettle key kite ladder lake lamp lantern lark leaf lemon
    letter lily lion lizard maple market meadow mill mirror moon moss mountain needle nest oak
    orchard otter owl paper parrot path pebble pencil pepper pigeon pine plum pond poplar prairie
    quill rabbit raven ribbon river robin rocket rope saddle salmon shell ship spoon squirrel
    stable star stone stork stream swan table thistle tower train tulip turtle valley violin
    wagon walnut wheel willow window winter wolf wren""".split()
NAMES = len(ADJECTIVES) * len(NOUNS)
"""Number of different names of lines."""
