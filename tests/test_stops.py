"""Stop strings: the same text however it was cut into pieces, and no part of a stop string ever shown."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from minillm.model.stops import StopChecker, truncate


def stream(pieces, stops):
    checker = StopChecker(stops)
    shown = [checker.feed(piece) for piece in pieces]
    return shown, checker.finish(), checker.stopped


def test_stop_split_over_pieces():
    assert stream(["Hello EN", "D", " more"], ("END",)) == (["Hello ", "", ""], "", "END")


def test_false_alarm_is_released():
    assert stream(["a EN", "OUGH"], ("END",)) == (["a ", "ENOUGH"], "", None)


def test_held_text_comes_out_at_the_end():
    assert stream(["a EN"], ("END",)) == (["a "], "EN", None)


def test_stop_completed_by_the_last_piece():
    assert stream(["x\n", "\n"], ("\n\n",)) == (["x", ""], "", "\n\n")


def test_stop_inside_one_piece_drops_what_follows():
    assert stream(["one. two. three"], (". t",)) == (["one"], "", ". t")


def test_without_stops_nothing_is_held():
    assert stream(["a", "b"], ()) == (["a", "b"], "", None)


def test_stop_first_complete_wins_and_the_longer_of_equals():
    assert truncate("xabc", ("abc", "b")) == ("xa", "b")
    assert truncate("xabc", ("c", "abc")) == ("x", "abc")


def brute_force(text, stops):
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("abé", max_size=4), max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
)
@example(["aab", "aa", "b"], ["aabaab"])
@settings(deadline=None, max_examples=300, derandomize=True)
def test_streamed_text_is_the_truncated_text(pieces, stops):
    expected, stopped = brute_force("".join(pieces), stops)
    shown, held, met = stream(pieces, stops)
    assert "".join(shown) + held == expected
    assert met == stopped
    so_far = ""
    for piece in shown:  # what is on the screen at any moment is a beginning of the final text
        so_far += piece
        assert expected.startswith(so_far)
        assert not any(stop in so_far for stop in stops)
