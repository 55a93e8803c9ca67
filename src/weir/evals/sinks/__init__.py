"""StreamingLLM's models with and without a sink, trained and compared: section 3.3, appendix I."""

from weir.evals.sinks.experiment import Asked, run
from weir.evals.sinks.page import tables, write_page

__all__ = ["Asked", "run", "tables", "write_page"]
