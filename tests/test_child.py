"""Child processes that answer on their pipes, and messages of a known length."""

import io
import sys

from jaxrl_llm.child import Child, pack_message, read_message

ECHO = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()); sys.stderr.write('x' * 200_000 + 'end')"


def test_a_child_answers_and_its_errors_fill_no_pipe():
    child = Child([sys.executable, "-c", ECHO])
    child.stdin.write(pack_message(b"one") + pack_message(b""))
    child.stdin.close()
    assert [read_message(child.stdout) for _ in range(3)] == [b"one", b"", None]
    assert child.wait() == 0 and child.last_errors(5) == "xxend"
    child.close()
    assert child.stdout.closed


def test_a_message_that_was_cut_short_is_none():
    assert pack_message(b"abc") == b"\0\0\0\0\0\0\0\3abc"
    assert read_message(io.BytesIO(b"\0\0\0\0\0\0\0\3ab")) is None
    assert read_message(io.BytesIO(b"\0\0\0")) is None


def test_closing_kills_a_child_that_waits():
    child = Child([sys.executable, "-c", "import time; time.sleep(1000)"])
    child.close()
    assert child.returncode == -9
