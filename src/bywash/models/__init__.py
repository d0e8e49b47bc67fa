"""Model adapters: Hugging Face transformers, each decoder layer exposed as stages."""

from transformers.utils import logging

# transformers' bars and notes would come once per rank; bywash reports loading itself, and every load error too.
logging.set_verbosity_error()
logging.disable_progress_bar()
