"""Where this package is: what messages, cards and saved folders say about it."""

# The public repository; [project.urls] of pyproject.toml has it too. There is none yet, and nothing on PyPI: a command
# that names the package there would install what someone else may have put under this name.
ADDRESS = ""
INSTALL = (
    f"`pip install git+{ADDRESS}`"
    if ADDRESS
    else "`pip install .` in a copy of its source, which has no public address yet"
)
