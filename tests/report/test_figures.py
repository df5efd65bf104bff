"""The heat map, the token strip, and how they are written to disk."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

matplotlib = pytest.importorskip("matplotlib")

from matplotlib import font_manager  # noqa: E402
from matplotlib.collections import LineCollection, QuadMesh  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

from regard.report import figures  # noqa: E402
from regard.report.figures import colormap, heatmap, save, token_strip  # noqa: E402
from regard.report.figures import text as lettering  # noqa: E402

HOSTILE = [
    "$\\frac{",
    "<b>&amp;</b>",
    "a\nb",
    "--><!--",
    "{0}%s\\n",
    "x_1^2",
    "$",
    "\x00",
    "\ud800",
    "\u200b",
]
FINITE = ["nan", "inf", "-inf"]


def rows(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.softmax(2 * torch.randn(*shape, generator=generator), -1)


def ticks(figure: Figure, side: str, panel: int = 0) -> list[str]:
    axis = getattr(figure.axes[panel], f"{side}axis")
    return [label.get_text() for label in axis.get_ticklabels()]


def drawn(figure: Figure, panel: int = 0) -> np.ndarray:
    """The numbers that the panel's colours stand for."""
    (mesh,) = [c for c in figure.axes[panel].collections if isinstance(c, QuadMesh)]
    return np.asarray(mesh.get_array()).reshape(mesh.get_array().shape)


def svg(figure: Figure, folder: Path, name: str = "figure.svg") -> str:
    return save(figure, folder / name).read_text(encoding="utf-8")


@pytest.fixture
def pixels(tmp_path):
    """Read a figure back as the RGB that a reader sees."""

    def read(figure: Figure) -> np.ndarray:
        from matplotlib.image import imread

        return imread(save(figure, tmp_path / "pixels.png"))[..., :3]

    return read


class TestHeatmap:
    def test_rows_are_queries_and_columns_are_keys(self):
        weights = rows(3, 5)
        figure = heatmap(weights, queries=list("abc"), keys=list("vwxyz"))
        np.testing.assert_allclose(drawn(figure), weights.double().numpy())
        assert ticks(figure, "y") == list("abc")
        assert ticks(figure, "x") == list("vwxyz")
        low, high = figure.axes[0].get_ylim()
        assert low > high  # the first query is on top

    def test_the_heaviest_cell_is_where_it_should_be(self, pixels):
        weights = torch.zeros(2, 3)
        weights[0, 2] = 1.0
        image = pixels(heatmap(weights))
        dark = np.argwhere((image - np.array(colormap()(1.0)[:3])).__abs__().max(-1) < 0.02)
        # Only the right of the map (and, further right, the end of the colour bar) is that dark.
        middle = dark[dark[:, 1] < 0.8 * image.shape[1]].mean(0) / image.shape[:2]
        assert middle[0] < 0.5 < middle[1]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_tensors_of_every_float(self, dtype):
        weights = rows(2, 3).to(dtype).requires_grad_()
        np.testing.assert_array_equal(drawn(heatmap(weights)), weights.detach().double().numpy())

    def test_arrays_lists_and_views(self):
        weights = rows(3, 5)
        for given in (weights.numpy(), weights.tolist(), weights.t().contiguous().t()):
            np.testing.assert_allclose(drawn(heatmap(given)), weights.double().numpy(), rtol=1e-6)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_tensors_on_a_gpu(self):
        weights = rows(2, 3)
        np.testing.assert_array_equal(drawn(heatmap(weights.cuda())), weights.double().numpy())

    def test_what_is_given_is_left_alone(self):
        array = np.array([[0.5, 0.5]])
        heatmap(array, title="t", gold=[(0, 1)])
        np.testing.assert_array_equal(array, [[0.5, 0.5]])

    def test_heads_share_one_colour_scale(self):
        weights = rows(5, 2, 3)
        figure = heatmap(weights)
        assert len(figure.axes) == 6  # five panels and one colour bar
        for head in range(5):
            np.testing.assert_allclose(drawn(figure, head), weights[head].double().numpy())
            assert figure.axes[head].get_title() == f"head {head}"
        assert {panel.collections[0].get_clim() for panel in figure.axes[:5]} == {(0.0, float(weights.max()))}

    def test_only_outer_panels_are_labelled(self):
        figure = heatmap(rows(6, 2, 3), keys=list("xyz"))  # four above, two below
        assert [bool(ticks(figure, "y", head)) for head in range(6)] == [
            True,
            False,
            False,
            False,
            True,
            False,
        ]
        assert [bool(ticks(figure, "x", head)) for head in range(6)] == [False, False, True, True, True, True]

    def test_one_cell(self, tmp_path):
        figure = heatmap([[1.0]], queries=["q"], keys=["k"])
        assert (ticks(figure, "y"), ticks(figure, "x")) == (["q"], ["k"])
        save(figure, tmp_path / "one.png")

    @pytest.mark.parametrize(
        ("shape", "says"),
        [((3, 0), "no keys"), ((0, 3), "no queries"), ((0, 0), "no keys"), ((2, 3, 0), "no keys")],
    )
    def test_nothing_to_draw_says_so(self, shape, says, tmp_path):
        figure = heatmap(torch.zeros(shape), title="nothing")
        assert [text.get_text() for text in figure.axes[0].texts] == [says]
        save(figure, tmp_path / "empty.pdf")

    def test_all_zero_is_pale(self):
        figure = heatmap(torch.zeros(2, 3))
        assert figure.axes[0].collections[0].get_clim() == (0.0, 1.0)

    @pytest.mark.parametrize("n", [3, 40, 300, 5000])
    def test_labels_never_crowd(self, n):
        figure = heatmap(torch.full((2, n), 1 / n), keys=[f"t{i}" for i in range(n)])
        labels, axes = ticks(figure, "x"), figure.axes[0]
        assert labels[0] == "t0"
        step = n if len(labels) == 1 else int(labels[1][1:])
        assert labels == [f"t{i}" for i in range(0, n, step)]
        figure.draw_without_rendering()
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert all(a.x1 <= b.x0 for a, b in pairwise(boxes))
        assert len(labels) == n or len(labels) >= 20

    def test_large_maps_are_images(self, tmp_path):
        """Half a million vector cells would take minutes and megabytes."""
        weights = rows(700, 700)
        figure = heatmap(weights)
        (image,) = figure.axes[0].images
        np.testing.assert_allclose(np.asarray(image.get_array()), weights.double().numpy())
        assert len(svg(figure, tmp_path)) < 3_000_000

    def test_long_labels_are_cut(self):
        figure = heatmap([[1.0]], keys=["x" * 1000], queries=["short"])
        (label,) = ticks(figure, "x")
        assert len(label) < 30
        assert label.endswith("…")

    def test_blank_tokens_are_visible(self):
        tokens = [" ", "", "\n", "\t", " the", "new york", "end ", "\u3000", "\r"]
        figure = heatmap(torch.full((9, 1), 1.0), queries=tokens)
        assert ticks(figure, "y") == ["␣", "∅", "↵", "⇥", "␣the", "new york", "end␣", "␣", "\\r"]

    @pytest.mark.parametrize("mask", [False, True])
    def test_gold_is_outlined_as_one_shape(self, mask):
        cells = [(0, 0), (0, 1), (2, 3)]
        gold: object = cells
        if mask:
            gold = torch.zeros(3, 4, dtype=torch.bool)
            for cell in cells:
                gold[cell] = True
        figure = heatmap(rows(3, 4), gold=gold)
        (lines,) = [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]
        edges = {tuple(map(tuple, segment)) for segment in lines.get_segments()}
        # Two neighbours share a border of six sides, a lone cell has four.
        assert len(edges) == 10
        assert ((0.5, -0.5), (0.5, 0.5)) not in edges
        assert {((-0.5, -0.5), (-0.5, 0.5)), ((2.5, 1.5), (3.5, 1.5)), ((3.5, 1.5), (3.5, 2.5))} <= edges

    def test_gold_of_heads(self):
        gold = torch.zeros(2, 3, 4, dtype=torch.bool)
        gold[1, 0, 0] = True
        figure = heatmap(rows(2, 3, 4), gold=gold)
        assert [sum(isinstance(c, LineCollection) for c in panel.collections) for panel in figure.axes[:2]] == [0, 1]
        shared = heatmap(rows(2, 3, 4), gold=gold[1])
        assert [sum(isinstance(c, LineCollection) for c in panel.collections) for panel in shared.axes[:2]] == [1, 1]

    @pytest.mark.parametrize("gold", [[], torch.zeros(3, 4, dtype=torch.bool), set()])
    def test_no_gold_draws_nothing(self, gold):
        figure = heatmap(rows(3, 4), gold=gold)
        assert not any(isinstance(c, LineCollection) for c in figure.axes[0].collections)

    @pytest.mark.parametrize("layout", [None, "constrained"])
    def test_draws_into_given_axes(self, layout, tmp_path):
        figure = Figure(layout=layout)
        left, right = figure.subplots(1, 2)
        assert heatmap(rows(2, 3), ax=right, title="here") is figure
        assert right.get_title() == "here"
        assert not left.collections
        save(figure, tmp_path / "axes.png")

    def test_the_weights_of_one_query_are_one_row(self):
        weights = torch.tensor([0.1, 0.7, 0.2])
        figure = heatmap(weights, keys=list("abc"), gold=torch.tensor([False, True, False]))
        np.testing.assert_allclose(drawn(figure), weights[None].double().numpy())
        assert ticks(figure, "x") == list("abc")
        assert (ticks(figure, "y"), figure.axes[0].get_ylabel()) == ([], "")
        (lines,) = [c for c in figure.axes[0].collections if isinstance(c, LineCollection)]
        assert {x for segment in lines.get_segments() for x, _ in segment} == {0.5, 1.5}
        named = heatmap(weights, queries=["why"])
        assert (ticks(named, "y"), named.axes[0].get_ylabel()) == (["why"], "queries")

    def test_rows_and_columns_are_called_as_one_likes(self):
        axes = heatmap(rows(2, 3), names=("answer", "输入")).axes[0]
        assert (axes.get_ylabel(), axes.get_xlabel()) == ("answer", "输入")

    def test_draws_into_a_subfigure(self):
        figure = Figure()
        axes = figure.subfigures(1, 2)[1].subplots()
        assert heatmap(rows(2, 3), ax=axes) is figure

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"weights": torch.tensor(1.0)}, r"weights: got \(\), expected shape \(N,\), \(Nq, N\) or \(H, Nq, N\)"),
            ({"weights": torch.ones(3), "queries": list("ab")}, r"queries: got 2 labels, expected 1 .* \(3,\)"),
            ({"names": "rows"}, "names: got 'rows', expected two, of the rows and of the columns"),
            ({"weights": torch.ones(1, 2, 3, 4)}, r"weights: got \(1, 2, 3, 4\), expected shape"),
            ({"weights": torch.ones(0, 2, 3)}, r"weights: got \(0, 2, 3\), expected at least one head"),
            ({"weights": [[0.1, -0.5]]}, r"weights: got -0\.5 at \(0, 1\), expected non-negative"),
            ({"weights": [[1, 2], [3]]}, "weights: got rows of different lengths"),
            (
                {"weights": [["a"]]},
                "weights: got an array of <U1, expected a tensor or an array of real numbers",
            ),
            ({"weights": torch.ones(1, 1, dtype=torch.complex64)}, "weights: got torch.complex64"),
            ({"queries": ["a"]}, r"queries: got 1 labels, expected 2 for weights of shape \(2, 3\)"),
            ({"keys": list("abcd")}, r"keys: got 4 labels, expected 3 for weights of shape \(2, 3\)"),
            ({"keys": "abc"}, r"keys: got the single string 'abc', .* list\(keys\)"),
            ({"gold": torch.ones(3, 2, dtype=torch.bool)}, r"gold: .* shape \(3, 2\), expected .* \(2, 3\)"),
            ({"gold": torch.ones(1, 2, 3, dtype=torch.bool)}, r"gold: got .* shape \(1, 2, 3\)"),
            ({"gold": torch.ones(2, 3)}, "gold: got an array of float32"),
            ({"gold": [(0, 3)]}, r"gold: got \(0, 3\), expected pairs within 2 queries and 3 keys"),
            ({"gold": 3}, "gold: got 3, expected booleans"),
            ({"gold": [(-1, 0)]}, r"gold: got \(-1, 0\)"),
            ({"gold": [(0, 1), (2,)]}, "gold: got rows of different lengths"),
        ],
    )
    def test_wrong_arguments_are_named(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            heatmap(**{"weights": torch.ones(2, 3), **arguments})

    @pytest.mark.parametrize("value", FINITE)
    def test_weights_must_be_finite(self, value):
        with pytest.raises(ValueError, match=rf"weights: got {value} at \(1, 0\), expected finite"):
            heatmap([[0.5, 0.5], [float(value), 0.0]])

    def test_axes_take_one_panel(self):
        with pytest.raises(ValueError, match=r"weights: got \(2, 3, 4\), .* where ax is given"):
            heatmap(rows(2, 3, 4), ax=Figure().subplots())


class TestTokenStrip:
    def test_tokens_in_order_shaded_by_weight(self):
        figure = token_strip(["a", "b", "c"], [0.0, 0.25, 0.5])
        axes = figure.axes[0]
        assert [text.get_text() for text in axes.texts] == ["a", "b", "c"]
        boxes = [patch for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
        for box, share in zip(boxes, (0.0, 0.5, 1.0), strict=True):
            assert box.get_facecolor() == pytest.approx(colormap()(share))
        assert [box.get_x() for box in boxes] == sorted(box.get_x() for box in boxes)

    def test_wraps_and_grows(self):
        short, long = (token_strip(["token"] * n, [1 / n] * n) for n in (3, 200))
        assert len({text.get_position()[1] for text in short.axes[0].texts}) == 1
        assert len({text.get_position()[1] for text in long.axes[0].texts}) > 5
        # No wider than the text, and never wider than a page.
        assert short.get_figwidth() < 2 < 6 < long.get_figwidth() < 7.5
        for figure in (short, long):
            boxes = [patch.get_bbox() for patch in figure.axes[0].patches]
            assert max(box.y1 for box in boxes) == pytest.approx(figure.axes[0].get_ylim()[0])
        assert max(box.x1 for box in boxes) == pytest.approx(long.axes[0].get_xlim()[1])
        assert long.get_figheight() > 3 * short.get_figheight()

    def test_text_stays_in_its_box_and_boxes_apart(self):
        words = ["a", "attention", "W" * 30, "iiiiii", "x" * 500, "é", "$\\frac{", "…"] * 3
        figure = token_strip(words, np.linspace(0, 1, len(words)))
        figure.draw_without_rendering()
        axes = figure.axes[0]
        frames = [patch.get_window_extent() for patch in axes.patches]
        with matplotlib.rc_context({"text.hinting": "none"}):
            for text, frame in zip(axes.texts, frames, strict=True):
                box = text.get_window_extent()
                assert frame.x0 <= box.x0
                assert box.x1 <= frame.x1
        for first, second in pairwise(frames):
            assert second.x0 > first.x1 or second.y1 < first.y0
        assert max(frame.x1 for frame in frames) <= axes.get_window_extent().x1 + 1e-6

    def test_a_line_of_letters_stays_in_its_box_on_paper(self, pixels):
        """Hinting would widen every letter a little, and a long token a lot."""
        image = pixels(token_strip(["x" * 500], [0.0]))
        image = image[: image.shape[0] // 2]  # above the colour bar
        ink = np.flatnonzero((image < 0.3).all(-1).any(0))
        box = np.flatnonzero((image[..., 2] < 0.97).any(0))
        assert ink.size
        assert box.min() < ink.min() <= ink.max() < box.max()

    def test_rows_repeat_the_text(self):
        weights = torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.2, 0.2]])
        axes = token_strip(["yes", "no"], weights).axes[0]
        assert [text.get_text() for text in axes.texts] == ["yes", "no"] * 3 + ["0", "1", "2"]
        colours = [patch.get_facecolor() for patch in axes.patches]
        for colour, weight in zip(colours, weights.flatten().tolist(), strict=True):
            assert colour == pytest.approx(colormap()(weight))

    def test_one_row_of_two_dimensions_is_still_numbered(self):
        axes = token_strip(["yes", "no"], [[0.5, 0.5]]).axes[0]
        assert [text.get_text() for text in axes.texts] == ["yes", "no", "0"]

    def test_blank_tokens_are_visible(self):
        axes = token_strip([" a", "\n", " "], [0.1, 0.2, 0.3]).axes[0]
        assert [text.get_text() for text in axes.texts] == ["␣a", "↵", "␣"]

    @pytest.mark.parametrize("weights", [torch.zeros(0), torch.zeros(2, 0)])
    def test_no_tokens(self, weights, tmp_path):
        figure = token_strip([], weights, title="empty")
        assert [text.get_text() for text in figure.axes[0].texts] == ["no tokens"]
        save(figure, tmp_path / "none.svg")

    def test_no_rows(self):
        assert token_strip(["a"], torch.zeros(0, 1)).axes[0].texts[0].get_text() == "no tokens"

    def test_thousands_of_tokens(self, tmp_path):
        n = 1500
        figure = token_strip([f"t{i}" for i in range(n)], np.full(n, 1 / n))
        assert len(figure.axes[0].texts) == n
        save(figure, tmp_path / "long.png")

    @pytest.mark.parametrize("layout", [None, "constrained"])
    def test_letters_shrink_to_fit_given_axes(self, layout):
        sizes = []
        for n in (5, 120):
            figure = Figure((6, 3), layout=layout)
            axes = figure.subplots(1, 2)[1]
            assert token_strip(["token"] * n, [1 / n] * n, ax=axes) is figure
            sizes.append(axes.texts[0].get_size())
            figure.draw_without_rendering()
            lowest = min(text.get_window_extent().y0 for text in axes.texts)
            assert lowest >= axes.get_window_extent().y0
        assert sizes[1] < sizes[0]

    def test_text_always_stands_out(self):
        """WCAG asks for a contrast of 4.5 between text and ground."""

        def luminance(colour: tuple[float, ...]) -> float:
            linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
            return float(np.dot([0.2126, 0.7152, 0.0722], linear))

        n = 200
        axes = token_strip(["x"] * n, np.linspace(0, 1, n)).axes[0]
        for text, box in zip(axes.texts, axes.patches, strict=True):
            ink, ground = sorted(map(luminance, (matplotlib.colors.to_rgb(text.get_color()), box.get_facecolor())))
            assert (ground + 0.05) / (ink + 0.05) >= 4.5

    @pytest.mark.parametrize(
        ("tokens", "weights", "message"),
        [
            (["a", "b"], [0.5], r"tokens: got 2 labels, expected 1 for weights of shape \(1,\)"),
            (["a"], [[0.5, 0.5]], r"tokens: got 1 labels, expected 2 for weights of shape \(1, 2\)"),
            ("ab", [0.5, 0.5], r"tokens: got the single string 'ab'"),
            (["a"], 0.5, r"weights: got \(\), expected shape \(N,\) or \(R, N\)"),
            (["a"], torch.ones(1, 1, 1), r"weights: got \(1, 1, 1\)"),
            (["a"], [-1.0], r"weights: got -1.0 at \(0,\), expected non-negative"),
            (["a"], [float("nan")], r"weights: got nan at \(0,\), expected finite"),
        ],
    )
    def test_wrong_arguments_are_named(self, tokens, weights, message):
        with pytest.raises(ValueError, match=message):
            token_strip(tokens, weights)


class TestText:
    def both(self, tokens: list[str], title: str | None = None) -> list[Figure]:
        share = np.full(len(tokens), 1 / len(tokens))
        return [
            heatmap(share[None].repeat(len(tokens), 0), queries=tokens, keys=tokens, title=title),
            token_strip(tokens, share, title=title),
        ]

    @pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
    def test_hostile_text_is_drawn_literally(self, suffix, tmp_path):
        for figure in self.both(HOSTILE, title="$\\frac{ <i> \x07 & $x$"):
            save(figure, tmp_path / f"hostile.{suffix}")
            for text in figure.findobj(matplotlib.text.Text):
                assert "$" not in text.get_text() or not text.get_parse_math()

    def test_hostile_text_makes_valid_xml(self, tmp_path):
        from xml.etree import ElementTree

        for figure in self.both([*HOSTILE, "\U00020000"]):  # a letter without a glyph: the text stays text
            root = ElementTree.fromstring(svg(figure, tmp_path))
            assert "<b>&amp;</b>" in {node.text for node in root.iter() if node.tag.endswith("}text")}

    def test_users_latex_setting_is_not_applied_to_tokens(self, tmp_path):
        with matplotlib.rc_context({"text.usetex": True}):
            for figure in self.both(["$\\frac{", "a"], title="a_b"):
                save(figure, tmp_path / "plain.png")  # would call latex

    def test_titles_may_have_lines(self):
        assert heatmap([[1.0]], title="one\ntwo").axes[0].get_title() == "one\ntwo"

    @pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
    def test_missing_glyphs_are_said_once(self, suffix, tmp_path, caplog, monkeypatch):
        monkeypatch.setattr(lettering, "_CJK", ())
        lettering._report_missing.cache_clear()
        with warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="regard"):
            warnings.simplefilter("error")
            for _ in range(2):
                for figure in self.both(["注", "意", "力"], title="注意力"):
                    save(figure, tmp_path / f"cjk.{suffix}")
        (message,) = [record.getMessage() for record in caplog.records if record.name == "regard"]
        assert "力意注" in message
        assert "font" in message

    def test_svg_keeps_what_no_font_draws_as_text(self, tmp_path, monkeypatch):
        monkeypatch.setattr(lettering, "_CJK", ())
        for figure in self.both(["注", "意"]):
            assert re.search(r"<text[^>]*>注</text>", svg(figure, tmp_path))
        for figure in self.both(["plain", "text"]):
            assert "<text" not in svg(figure, tmp_path)

    def test_an_installed_cjk_font_is_taken(self, tmp_path, monkeypatch):
        letters = "注意力"
        path = tmp_path / "cjk.ttf"
        write_font(path, "Noto Sans CJK SC", letters)
        kept = list(font_manager.fontManager.ttflist)
        font_manager.fontManager.addfont(path)
        monkeypatch.setattr(font_manager.fontManager, "ttflist", list(font_manager.fontManager.ttflist))
        try:
            for figure in self.both(list(letters)):
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    text = svg(figure, tmp_path)
                assert "<text" not in text
                drawn = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text() in set(letters)]
                families = {tuple(text.get_fontfamily()) for text in drawn}
                assert families == {("sans-serif", "Noto Sans CJK SC")}
        finally:
            monkeypatch.undo()
            font_manager.fontManager.ttflist[:] = kept
            lettering._letters.cache_clear()


def write_font(path: Path, family: str, letters: str) -> None:
    """A font of squares."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for corner in ((0, 900), (900, 900), (900, 0)):
        pen.lineTo(corner)
    pen.closePath()
    names = [".notdef", *(f"uni{ord(letter):04X}" for letter in letters)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(letter): name for letter, name in zip(letters, names[1:], strict=True)})
    builder.setupGlyf({name: pen.glyph() for name in names})
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


class TestSave:
    def figures(self) -> list[Figure]:
        return [
            heatmap(rows(3, 5), keys=list("abcde"), title="map", gold=[(0, 0)]),
            heatmap(rows(3, 2, 4), title="grid"),
            heatmap(rows(60, 60)),
            token_strip(list("tokens"), rows(2, 6), title="strip"),
        ]

    @pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
    def test_same_figure_same_bytes(self, suffix, tmp_path):
        for first, second in zip(self.figures(), self.figures(), strict=True):
            one, two = (save(figure, tmp_path / f"{i}.{suffix}") for i, figure in enumerate((first, second)))
            assert one.read_bytes() == two.read_bytes()
            assert save(first, tmp_path / f"again.{suffix}").read_bytes() == one.read_bytes()

    def test_same_bytes_in_another_process(self, tmp_path):
        """Hash seeds, set orders and identifiers differ between processes; the file must not."""
        code = (
            "import sys; from regard.report.figures import heatmap, save; "
            "save(heatmap([[0.9, 0.1], [0.2, 0.8]], title='t', gold=[(0, 0)]), sys.argv[1])"
        )
        source = str(Path(figures.__file__).parents[3])
        for seed in "12":
            environment = {
                "PYTHONPATH": source,
                "PYTHONHASHSEED": seed,
                "MPLCONFIGDIR": str(tmp_path / "mpl"),
            }
            subprocess.run([sys.executable, "-c", code, str(tmp_path / f"{seed}.svg")], env=environment, check=True)
        assert (tmp_path / "1.svg").read_bytes() == (tmp_path / "2.svg").read_bytes()

    @pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("PNG", b"\x89PNG"), ("pdf", b"%PDF")])
    def test_format_follows_the_suffix(self, suffix, start, tmp_path):
        path = save(heatmap([[1.0]]), str(tmp_path / f"figure.{suffix}"))
        content = path.read_bytes()
        assert content.startswith(start)
        assert not re.search(rb"20\d\d-\d\d-\d\d|CreationDate|Matplotlib v", content)

    def test_makes_folders_and_leaves_nothing_behind(self, tmp_path):
        path = save(heatmap([[1.0]]), tmp_path / "a" / "b" / "figure.png")
        assert path == tmp_path / "a" / "b" / "figure.png"
        assert [entry.name for entry in path.parent.iterdir()] == ["figure.png"]

    def test_a_failed_write_keeps_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "figure.svg"
        path.write_text("old")

        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr("regard.report.figures.canvas.os.replace", fail)
        with pytest.raises(OSError, match="disk full"):
            save(heatmap([[1.0]]), path)
        assert path.read_text() == "old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["figure.svg"]

    def test_file_mode_is_the_users(self, tmp_path):
        """A temporary file made for privacy would leave a picture that a web server cannot read."""
        (tmp_path / "plain").touch()
        path = save(heatmap([[1.0]]), tmp_path / "figure.svg")
        assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode

    @pytest.mark.parametrize("name", ["figure", "figure.jpg", "figure.svg.gz", ".svg"])
    def test_other_suffixes_are_refused(self, name, tmp_path):
        with pytest.raises(ValueError, match=rf"path: got .*{re.escape(name)}', expected .*\.svg, \.png, \.pdf"):
            save(heatmap([[1.0]]), tmp_path / name)
        assert not list(tmp_path.iterdir())


class TestHouse:
    def test_pyplot_is_never_touched(self, tmp_path):
        code = (
            "import sys; from regard.report.figures import heatmap, save, token_strip; "
            "assert 'matplotlib' not in sys.modules; "
            "save(heatmap([[1.0]]), sys.argv[1]); token_strip(['a'], [1.0]); "
            "assert 'matplotlib.pyplot' not in sys.modules"
        )
        environment = {
            "PYTHONPATH": str(Path(figures.__file__).parents[3]),
            "MPLCONFIGDIR": str(tmp_path / "mpl"),
        }
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "figure.svg")], env=environment, check=True)

    def test_settings_are_left_alone(self, tmp_path):
        before = dict(matplotlib.rcParams)
        save(token_strip(["a"], [1.0]), tmp_path / "figure.svg")
        save(heatmap([[1.0]]), tmp_path / "figure.pdf")
        assert dict(matplotlib.rcParams) == before

    def test_missing_matplotlib_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        for draw in (
            lambda: heatmap([[1.0]]),
            lambda: token_strip(["a"], [1.0]),
            lambda: save(None, "a.svg"),
        ):
            with pytest.raises(ImportError, match=r"pip install 'regard\[evaluate\]'"):
                draw()

    def test_colours_grow_evenly_darker_for_every_eye(self):
        """Lightness falls in even steps, also as seen without one kind of cone (Machado et al. 2009)."""
        views = {
            "all cones": np.eye(3),
            "no long": np.array(
                [
                    [0.152286, 1.052583, -0.204868],
                    [0.114503, 0.786281, 0.099216],
                    [-0.003882, -0.048116, 1.051998],
                ]
            ),
            "no middle": np.array(
                [
                    [0.367322, 0.860646, -0.227968],
                    [0.280085, 0.672501, 0.047413],
                    [-0.011820, 0.042940, 0.968881],
                ]
            ),
            "no short": np.array(
                [
                    [1.255528, -0.076749, -0.178779],
                    [-0.078411, 0.930809, 0.147602],
                    [0.004733, 0.691367, 0.303900],
                ]
            ),
        }
        colours = colormap()(np.linspace(0, 1, 33))[:, :3]
        linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
        for name, view in views.items():
            luminance = np.clip(linear @ view.T, 0, 1) @ [0.2126, 0.7152, 0.0722]
            lightness = 116 * np.cbrt(luminance) - 16
            steps = -np.diff(lightness)
            assert steps.min() > 0.5 * steps.mean() > 0.8, name
