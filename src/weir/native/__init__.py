"""The CPU engine: faster matrix products, and whole decode steps that replace a model's own.

The parts:

- *Weights in blocks.* `block_weights` has layers whose weights are the blocks of GGUF files, and
  `stored_blocks` reads them from a file. `block_formats` describes their layout in memory, and
  `block_types` how a file stores each type. `quantized_weights` quantizes the weights of a loaded
  model to blocks or with torchao. `block_mlp` runs a whole MLP in blocks, for prompts.
- *Matrix products of few rows.* `linear_kernels` times PyTorch's products and the kernel's on the
  weights of a model, and uses the faster ones. `huge_pages` moves weights to memory that is read
  faster.
- *Whole decode steps in one call.* `engine` has `NativeStep`, a `StepEngine`. It writes the
  addresses of a decoder's weights and a cache's slots into a table of operations, which a kernel
  runs.

Supported decoders have the form of Llama's: a norm, attention, a norm and a gated MLP in each
layer, each with variations that `form` lists. `docs/limits.md` lists the families. weir does not
trust the name of a decoder:

1. `form` reads the names and classes of the modules, and refuses modules that it does not know.
2. `proof` calls the decoder's own modules with random numbers and compares their answers with
   formulas.
3. `program` makes the table for the slots of a cache, and `check` compares the result of each of
   its operations with PyTorch's.
4. `watch` notices before every step whether a module or a weight was replaced, or a hook was added.

If a decoder is refused, the model runs its own steps, and `StepEngine.why_not` says why.

`kernels` has the numba kernels, and `dispatch` finds them. The engine is in a room above `cache`,
which uses only the interface `weir.models.step_engine`. `weir.compile_steps` switches it on
(`switching`).
"""

from weir.native.block_formats import BLOCK, BLOCK_TYPES
from weir.native.block_weights import (
    AS_STORED,
    BLOCK_FORMATS,
    BlockEmbedding,
    BlockLinear,
    check_stored,
    describe_weights,
    has_block_weights,
)
from weir.native.dispatch import linear_blocks, paths
from weir.native.engine import UNFINISHED
from weir.native.linear_kernels import choose_products
from weir.native.quantized_weights import (
    BITS,
    check_bits,
    check_not_quantized,
    finish_quantized,
    quantize_weights,
    run_blocks,
    shrink,
)
from weir.native.stored_blocks import put_stored_blocks, shrink_to_stored, stored_in_blocks
from weir.native.switching import compile_steps

__all__ = ["choose_products", "compile_steps"]
