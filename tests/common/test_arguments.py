"""Help shows defaults and nothing else; usage shows how the command was called; a list is given once."""

import pytest

from megabert.common.arguments import Parser


def test_help_shows_each_default_once():
    parser = Parser(prog="x", description="First line.\n\n    kept as it is\n")
    parser.add_argument("--lr", type=float, default=5e-5, help="100% of it")
    parser.add_argument("--seq-len", nargs="+", type=int, default=[128, 512], help="tokens")
    parser.add_argument("--tokenizer", default="", help="a file")
    parser.add_argument("--quiet", action="store_true", help="no bar")
    parser.add_argument("rest", nargs="*", default=["a"], help="more")
    shown = " ".join(parser.format_help().split())
    assert "100% of it (default: 5e-05)" in shown and "tokens (default: 128 512)" in shown
    assert shown.count("default") == 2 and "    kept as it is\n" in parser.format_help()


@pytest.mark.parametrize("default", [None, [], ["a"]])
def test_a_list_option_given_twice_is_refused(default, capsys):
    parser = Parser(prog="x")
    add = parser.add_subparsers().add_parser("do").add_argument_group("g").add_argument
    add("--input", nargs="+", default=default)
    add("--name", default="")
    assert parser.parse_args(["do", "--input", "a", "b", "--name", "c", "--name", "d"]).input == ["a", "b"]
    with pytest.raises(SystemExit):
        parser.parse_args(["do", "--input", "a", "--name", "c", "--input=a"])
    assert "error: --input is given twice; name all its values after one (" in capsys.readouterr().err
