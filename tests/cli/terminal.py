"""Run the command line for tests: in this process where that is enough, else in a separate one."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import weir
from weir.cli import common, main

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SOURCE = str(Path(weir.__file__).parents[1])
LIMIT = 600
"""Seconds after which a command counts as hanging. A busy machine may not run it for a minute."""


def make_model(folder: Path, template: str | None = None, layers: int = 1) -> str:
    """A small random Llama in which every byte is a token; its answers never end by themselves."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    start = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=start)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@dataclass
class Ended:
    """The exit code and the outputs of a command that has ended."""

    code: int
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], *words: object, columns: int = 100) -> Ended:
    """Run `weir WORDS` in this process, on a terminal with the given number of columns."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["weir", *map(str, words)])
        patch.setenv("COLUMNS", str(columns))
        # Commands print an extra line if something takes long, which it may on a busy machine.
        patch.setattr(common, "LONG_WAIT", LIMIT)
        for console in (common.output(), common.messages()):
            # A console made while COLUMNS was set keeps that width for good.
            patch.setattr(console, "_width", columns)
        with pytest.raises(SystemExit) as ended:
            main()
    out, err = capsys.readouterr()
    return Ended(int(ended.value.code or 0), out, err)


def _hear_signals() -> None:
    """Stop ignoring Ctrl-C and a closed terminal.

    A shell makes its background commands ignore Ctrl-C, and `nohup` makes a command ignore that its
    terminal is closed. Processes that such a command starts inherit this.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Process:
    """`weir WORDS` in a separate process. Standard error is a terminal, so progress is shown."""

    def __init__(self, *words: object, **env: str) -> None:
        self._terminal, theirs = pty.openpty()
        self.err = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from weir.cli import main; main()", *map(str, words)],
            env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "200", "TERM": "xterm", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=theirs,
            preexec_fn=_hear_signals,
        )
        os.close(theirs)

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def wait_for(self, words: str, times: int = 1, seconds: float = 90) -> None:
        """Read standard error until `words` has appeared `times` times."""
        end = time.monotonic() + seconds
        while self.err.count(words) < times:
            assert time.monotonic() < end, f"it never said {words!r}: {self.err}"
            assert self._read(0.1) or self.process.poll() is None, self.err

    def wait_until(self, happened: Callable[[], bool], seconds: float = 90) -> None:
        """Read standard error until `happened()` is true."""
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, self.err
            assert self.process.poll() is None, f"it ended by itself: {self.err}"
            self._read(0.002)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def interrupt_until_a_line(self) -> None:
        """Press Ctrl-C, again and again until standard error has one more line.

        Python looks for signals between its own instructions. A signal that comes after the last of
        them, but before the system waits for input, is only noticed together with the next signal.
        """
        end = time.monotonic() + LIMIT
        lines = self.err.count("\n")
        while self.err.count("\n") == lines:
            assert time.monotonic() < end, self.err
            self.interrupt()
            self._read(1)

    def end(self) -> Ended:
        """Close its standard input, and wait until it ends."""
        end = time.monotonic() + LIMIT
        while True:
            # A command that draws its progress would wait if nobody read its terminal.
            while self._read(0):
                pass
            try:
                out, _ = self.process.communicate(timeout=0.05)
                break
            except subprocess.TimeoutExpired:
                assert time.monotonic() < end, self.err
        while self._read(0):
            pass
        os.close(self._terminal)
        return Ended(self.process.returncode, out.decode(), self.err)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._terminal], [], [], seconds)[0]:
            return False
        try:
            found = os.read(self._terminal, 65536)
        except OSError:  # the other side is closed
            return False
        self.err += found.decode(errors="replace")
        return bool(found)
