"""Trains small models on books and exercises, with the sinks of StreamingLLM's section 3.3."""

from weir.train.exercises import DIGITS, NAMES, Words, front_of, passage, practiced
from weir.train.folder import WORK, run
from weir.train.log import read_log, smoothed
from weir.train.processes import Processes
from weir.train.recipe import PRESETS, ROOM, Preset, SinkKind, TrainingRecipe
