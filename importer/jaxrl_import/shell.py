"""Shell scripts as lists of commands: variables are expanded, nothing is executed.

Read are assignments, arrays, quotes, ${NAME:-default}, $((arithmetic)), continuation lines, comments and here
documents. What only running the script would tell (other substitutions, arguments) is marked as unknown.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxrl_import.conditions import Branching, Chain, matches, truth
from jaxrl_import.expressions import default_text, edited_value, integer_value, path_output
from jaxrl_import.values import unknown, unknown_names
from jaxrl_llm.errors import UserError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*")
ARRAY = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
REDIRECTION = re.compile(r"(?:&>>?|\d*(?:>[>&|]?|<<<|<[&>]?(?!<)))(?!\()[ \t]*")
SPLIT = re.compile(r"(?:\x00[^\x00]*\x00|\S)+")
OPERATOR = re.compile(r"&&|\|\||;;|[;|&()]")
PLAIN = re.compile(r"[^\s'\"\\$`;|&()]+")
ANSI_QUOTED = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
ESCAPE, ESCAPES = re.compile(r"\\(.)", re.DOTALL), {"n": "\n", "t": "\t", "r": "\r"}
MAX_CHARS = 100_000  # of a variable
KEYWORDS = {"if", "then", "else", "elif", "while", "until", "do", "time", "exec", "!", "{", "("}
BRANCH = re.compile(r"(if|elif|else|fi|case|esac)(?=[\s;]|$)")
THEN = re.compile(r"[;\n]\s*then(?=\s)")
CASE = re.compile(r"case\s+(.+?)\s+in(?=\s)", re.DOTALL)
OPENING = {"export", "declare", "local", "readonly", "typeset", *KEYWORDS}
"""Words before which an assignment may follow."""


class Word(NamedTuple):
    """A word of a command, expanded."""

    text: str
    line: int


class Script:
    """The commands of a shell script, each a list of words, and the variables at its end.

    Args:
        text: the script.
        name: for messages.
        variables: known from outside.

    Raises:
        UserError: a quote or bracket that is never closed, with its line.
    """

    def __init__(self, text: str, name: str, variables: Mapping[str, str]):
        self._text, self._name, self._at, self._line = text, name, 0, 1
        self._given = dict(variables)
        self._variables: dict[str, str] = {"HOME": "~", "PWD": ".", **variables}
        self._arrays: dict[str, list[str]] = {}
        self._here: list[tuple[str, bool, list[Word]]] = []
        self._branchings: list[Branching] = []
        self._chain = Chain()
        self._is_open = True
        self.branches: dict[str, int] = {}
        """Variables that a branch of an `if` assigns once more -> the line; the first value counts."""
        self.array_branches: dict[str, int] = {}  # as `branches`, of arrays
        self.commands: list[list[Word]] = []
        self._read()

    def _read(self) -> None:
        command: list[Word] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            # A branch, a redirection, the end of a command, white space, or a word.
            if not command and self._branch():
                continue
            if match := REDIRECTION.match(self._text, self._at):
                self._skip(len(match[0]))
                self._expansion()
            elif char == "\n" or self._operator():
                self._end(command)
                self._chain.end(self._operator(), [word.text for word in command])
                command = []
                if self._operator() == ";;" and self._branchings:
                    self._branchings[-1].expects_pattern = self._branchings[-1].value is not None
                self._skip(len(self._operator()) or 1)
                if char == "\n":
                    self._read_here_documents()
            # White space, comments and here-documents, then words of the command.
            elif char in " \t\r":
                self._skip(1)
            elif self._text.startswith(("\\\n", "\\\r\n"), self._at):
                self._skip(2 if self._text[self._at + 1] == "\n" else 3)
            elif char == "#":
                self._skip(self._text.find("\n", self._at) % (len(self._text) + 1) - self._at)
            elif match := HERE_DOCUMENT.match(self._text, self._at):
                self._here.append((match[2], not match[1], command))
                self._skip(len(match[0]))
            else:
                self._chain.is_begun = True
                command += self._word(command)
        self._end(command)

    def _operator(self) -> str:
        match = OPERATOR.match(self._text, self._at)
        return match[0] if match else ""

    def _skip(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _end(self, command: list[Word]) -> None:
        start = next((i for i, word in enumerate(command) if word.text not in KEYWORDS), len(command))
        command = command[start:] if start else command
        if command and self._active() is not False and not any(here is command for _, _, here in self._here):
            self.commands.append(command)

    def _active(self) -> bool | None:
        """Return whether the branch at this place is taken; None = not known."""
        states = [self._chain.active, *(branching.active for branching in self._branchings)]
        return False if False in states else None if None in states else True

    def _branch(self) -> bool:
        """Skip a word of `if` or `case` at the start of a command; return False without one."""
        top = self._branchings[-1] if self._branchings else None
        match = BRANCH.match(self._text, self._at)
        if match and match[1] in ("fi", "esac") and top:
            self._branchings.pop()
        elif top and top.expects_pattern and self._text[self._at] not in " \t\r\n#":
            end = self._text.find(")", self._at)
            if end < 0:
                return False
            top.enter(matches(top.value or "", self._text[self._at : end], self._words))
            top.expects_pattern = False
            self._skip(end + 1 - self._at)
            return True
        elif match and match[1] in ("if", "elif"):
            return self._condition(match[1], top)
        elif match and match[1] == "else" and top:
            top.enter(True)
        elif match and (case := CASE.match(self._text, self._at)):
            self._branchings.append(Branching(" ".join(self._words(case[1]))))
            self._skip(len(case[0]))
            return True
        else:
            return False
        self._skip(len(match[0]))
        return True

    def _condition(self, word: str, top: Branching | None) -> bool:
        """Enter the branch of an `if` or `elif`, and skip its `then`."""
        then = THEN.search(self._text, self._at)
        if then is None or (word == "elif" and top is None):
            return False
        text = self._text[self._at + len(word) : then.start()]
        if word == "if":
            top = Branching()
            self._branchings.append(top)
        top.enter(truth(text, self._words))
        is_test = re.match(r"\s*(!\s+)?[\[({]|\s*test\s", text)
        self._skip((then.end() if is_test else self._at + len(word)) - self._at)
        return True

    def _words(self, text: str) -> list[str]:
        """Return the words that a text expands to at this place."""
        script = Script(f": {text.strip()}", self._name, self._variables)
        return [word.text for command in script.commands[:1] for word in command[1:]]

    def _word(self, command: list[Word]) -> list[Word]:
        """Return the words that one word expands to; an assignment before a command is none."""
        line = self._line
        is_first = not command or (self._is_open and command[-1].text in OPENING)
        match = ASSIGNMENT.match(self._text, self._at) if is_first else None
        if match:
            self._skip(len(match[0]))
            if self._text.startswith("(", self._at):
                self._assign_array(match[1], bool(match[2]))
            else:
                self._assign(match[1], " ".join(self._expansion()[0]), bool(match[2]))
            return []
        texts, _ = self._expansion()
        self._is_open = is_first and bool(texts) and texts[-1] in OPENING
        return [Word(text, line) for text in texts]

    def _assign(self, name: str, value: str, appended: bool) -> None:
        value = self._variables.get(name, "") + value if appended else value
        if len(value) > MAX_CHARS:
            raise UserError(f"{self._name}:{self._line}: {name} is longer than {MAX_CHARS:,}. Shorten it.")
        if name in self._given or self._active() is False:
            return
        if self._active() is None and self._variables.get(name) not in (None, "", value):
            self.branches.setdefault(name, self._line)
            if not unknown_names(self._variables[name]):
                return
        self._variables[name] = value

    def _assign_array(self, name: str, appended: bool) -> None:
        start, values, size = self._line, [], 0
        self._skip(1)
        while not self._text.startswith(")", self._at):
            if self._at >= len(self._text):
                raise UserError(f"{self._name}:{start}: {name}=( is never closed. Close it with ).")
            if self._text[self._at] in " \t\r\n":
                self._skip(1)
            elif self._text.startswith("\\\n", self._at):
                self._skip(2)
            elif self._text[self._at] == "#":
                self._skip(max(self._text.find("\n", self._at), self._at + 1) - self._at)
            elif self._operator():
                self._skip(len(self._operator()))
            else:
                values += self._expansion()[0]
                size += len(values[-1]) if values else 0
                if max(size, len(values)) > MAX_CHARS:
                    raise UserError(f"{self._name}:{start}: {name} is longer than {MAX_CHARS:,}. Shorten it.")
        self._skip(1)
        if self._active() is False:
            return
        # A branch that is not taken assigns nothing; of several that may be, the first does.
        if self._active() is None:
            self.array_branches.setdefault(name, start)
        if any(b.is_second and b.active is None for b in (self._chain, *self._branchings)):
            return
        if not appended:
            self._arrays[name] = []
        self._arrays.setdefault(name, []).extend(values)
        if len(self._arrays[name]) > MAX_CHARS:
            raise UserError(f"{self._name}:{start}: {name} is longer than {MAX_CHARS:,}. Shorten it.")

    def _expansion(self) -> tuple[list[str], bool]:
        """Return the words that the word at this place expands to, and whether a part is quoted."""
        words, current, quoted = [], "", False
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t\r\n" or (self._operator() and not self._text.startswith("$", self._at)):
                break
            # Quotes join to the word; an array's items and split text are separate words.
            if char == "'":
                current, quoted = current + self._quoted("'"), True
            elif char == '"':
                parts, quoted = self._double_quoted(), True
                words += [current + part for part in parts[:1] if len(parts) > 1] + parts[1:-1]
                current = parts[-1] if len(parts) > 1 else current + "".join(parts)
            # An escaped character or line end, then expansions and plain text.
            elif char == "\\":
                if self._text.startswith(("\\\n", "\\\r\n"), self._at):
                    self._skip(2 if self._text[self._at + 1] == "\n" else 3)
                    break
                current += self._text[self._at + 1 : self._at + 2]
                self._skip(2)
            elif match := ANSI_QUOTED.match(self._text, self._at):
                current, quoted = current + ESCAPE.sub(_unescaped, match[1]), True
                self._skip(len(match[0]))
            elif self._text.startswith('$"', self._at):
                self._skip(1)
            elif match := ARRAY.match(self._text, self._at):
                words += ([current] if current else []) + self._arrays.get(match[1], [])
                current = ""
                self._skip(len(match[0]))
            elif char in "$`":
                split = SPLIT.findall(current + self._substitution(quoted=False)) or [""]
                words, current = words + split[:-1], split[-1]
            else:
                plain = PLAIN.match(self._text, self._at)
                current += plain[0] if plain else char
                self._skip(len(plain[0]) if plain else 1)
        return words + [current] * bool(current or (quoted and not words)), quoted

    def _quoted(self, quote: str) -> str:
        start = self._line
        end = self._text.find(quote, self._at + 1)
        if end < 0:
            raise UserError(f"{self._name}:{start}: the quote {quote} is never closed. Close it.")
        inside = self._text[self._at + 1 : end]
        self._skip(end + 1 - self._at)
        return inside

    def _double_quoted(self) -> list[str]:
        """Return the words of a text in double quotes: one, or an array's."""
        start, words, current = self._line, [], ""
        self._skip(1)
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if match := ARRAY.match(self._text, self._at):
                values = self._arrays.get(match[1], [])
                words, current = [*words, *values[:-1]], "".join(values[-1:])
                self._skip(len(match[0]))
            elif char in "$`":
                current += self._substitution()
            elif char == "\\":
                escaped = self._text[self._at + 1 : self._at + 2]
                current += escaped if escaped in '$`"\\' else "" if escaped == "\n" else f"\\{escaped}"
                self._skip(2)
            else:
                current += char
                self._skip(1)
        if self._at >= len(self._text):
            raise UserError(f'{self._name}:{start}: the quote " is never closed. Close it.')
        self._skip(1)
        return [*words, current]

    def _substitution(self, quoted: bool = True) -> str:
        """Return the value of the $... at this place; unknown if it would have to be run."""
        if self._text[self._at] == "`":
            return unknown(f"`{self._quoted('`')}`")
        if self._text.startswith("$((", self._at):
            return self._arithmetic(self._bracketed("$((", "))"))
        if self._text.startswith("$(", self._at):
            return self._path_command(self._bracketed("$(", ")").strip())
        if self._text.startswith("${", self._at):
            return self._parameter(self._bracketed("${", "}"), quoted)
        if match := NAME.match(self._text, self._at + 1):
            self._skip(1 + len(match[0]))
            return self._variable(match[0])
        special = self._text[self._at + 1 : self._at + 2]
        if not special.strip() or special in "\"'/.,:;=+)]}%":  # a dollar alone
            self._skip(1)
            return "$"
        self._skip(2)
        return {"@": "", "*": "", "0": self._name}.get(special, unknown(special))

    def _path_command(self, inside: str) -> str:
        """Return the output of pwd, dirname, basename, realpath or cd X && pwd, which only compute paths."""
        plain = inside.replace('\\"', "").replace('"', "")
        words = expand(plain, self._name, self._line, self._variables).split()
        output = path_output(words) if not any(map(unknown_names, words)) else None
        return unknown(f"({inside})") if output is None else output

    def _bracketed(self, opening: str, closing: str) -> str:
        """Return the text between brackets, which may be nested, and skip them."""
        start, begin = self._line, self._at
        one, other = opening[-1], closing[0]
        depth, at = len(opening.replace("$", "")), begin + len(opening)
        while depth and at < len(self._text):
            depth += (self._text[at] == one) - (self._text[at] == other)
            at += 1
        if depth:
            raise UserError(f"{self._name}:{start}: {opening} is never closed. Close it with {closing}.")
        self._skip(at - begin)
        return self._text[begin + len(opening) : at - len(closing)]

    def _parameter(self, inside: str, quoted: bool) -> str:
        """Return the value of ${...}."""
        match = re.match(r"(\w+)(:?[-=+?]|[#%/^,\[:])?(.*)", inside, re.DOTALL)
        if inside == "BASH_SOURCE[0]" or not match or match[2] is None:
            return self._variable(inside.removesuffix("[0]"))
        name, sign, rest = match[1], match[2], match[3]
        value = self._variables.get(name)
        expanded = lambda part: expand(part, self._name, self._line, self._variables)
        if sign in (":-", "-", ":=", "="):
            if value and not unknown_names(value):
                return value
            return default_text(rest, quoted, expanded)
        if sign in (":+", "+"):
            return default_text(rest, quoted, expanded) if value else ""
        if value is None or unknown_names(value):
            return unknown(name)
        if sign in (":?", "?") and value:
            return value
        return edited_value(value, f"{sign}{rest}")

    def _variable(self, name: str) -> str:
        if name in self._variables:
            return self._variables[name]
        if name == "BASH_SOURCE":
            return self._name
        return self._arrays[name][0] if self._arrays.get(name) else unknown(name)

    def _arithmetic(self, inside: str) -> str:
        plain = expand(inside, self._name, self._line, self._variables)
        named = NAME.sub(lambda match: self._variables.get(match[0], unknown(match[0])), plain)
        if names := unknown_names(named):
            return "".join(map(unknown, names))
        try:
            return str(integer_value(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return unknown(f"(({inside.strip()}))")

    def _read_here_documents(self) -> None:
        for end, expanded, command in self._here:
            start, begin = self._line, self._at
            match = re.compile(rf"^\t*{end}[ \t]*$", re.MULTILINE).search(self._text, begin)
            if match is None:
                raise UserError(f"{self._name}:{start}: <<{end} has no line {end}. End it with one.")
            body = self._text[begin : match.start()]
            self._skip(match.end() - begin)
            words = [word.text for word in command]
            if words[:1] == ["read"]:
                body = expand(body, self._name, start, self._variables) if expanded else body
                self._variables[words[-1]] = body
        self._here = []


def _unescaped(match: re.Match[str]) -> str:
    return ESCAPES.get(match[1], match[1])


def expand(text: str, name: str, line: int, variables: Mapping[str, str]) -> str:
    """Return text with the substitutions of double quotes."""
    escaped = text.replace('"', '\\"')
    script = Script("", name, variables)
    script._text, script._line = f'"{escaped}"', line
    return " ".join(script._double_quoted())
