"""``python -m pensieve`` is the ``pensieve`` command."""

from pensieve.cli.main import main

main()
