"""Checkpoints on disk: whatever a training run left behind, read strictly, and a clean folder written.

From a path to a model, each step in a module of its own:

    hub         a Hugging Face id -> a folder
    files       a path -> which files hold weights, configuration and tokenizer
    stores      files -> tensors by stored name, nothing read yet (safetensors_store, torch_store, distributed_store)
    names       stored names -> the model's: wrapper prefixes, the paper's names; key_map for names of other kinds
    inference   names and shapes -> a configuration, where there is none
    fitting     names and shapes -> how each parameter of the model comes from the stored tensors
    opening     all of that: `open_checkpoint`, `load_checkpoint`
    saving      a model or an opened checkpoint -> a clean folder

Loading is strict. Every parameter of the configured model must be in the files with its shape, and every tensor in the
files must be a parameter; whatever does not fit is listed, and nothing ever runs with leftover random weights. Only
`opening`, `saving` and the stores' `read` need torch.
"""
