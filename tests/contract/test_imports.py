"""What importing the package costs, and what it does without."""

import resource
import subprocess
import sys
import textwrap

import pytest


def run(code: str) -> str:
    """The output of some code in a process of its own."""
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_works_without_triton():
    run(
        """
        import sys
        sys.modules["triton"] = None  # an import of it is now an ImportError
        import torch, regard
        for impl in ("dense", "blockwise"):
            attend = regard.Attention("additive", query_dim=3, key_dim=5, hidden_dim=7, impl=impl)
            attend(torch.randn(2, 3, 3), torch.randn(2, 4, 5)).sum().backward()
        with regard.record(attend) as trace:
            attend(torch.randn(2, 3, 3), torch.randn(2, 4, 5))
        assert trace.weights.shape == (2, 3, 4)
        assert len(list(regard.catalog.entries())) > 20
        """
    )


def test_a_first_step_does_not_load_the_compiler():
    """Only panels that are recomputed do: torch's own checkpoint loads it on its first call."""
    told = run(
        """
        import sys, torch, regard
        x = torch.randn(2, 300, 4, requires_grad=True)
        for score in ("additive", "scaled-dot", "dot"):
            attend = regard.Attention(score, **(dict(query_dim=4, key_dim=4, hidden_dim=8) if score == "additive" else {}))
            attend(x, x).sum().backward()
        edges = torch.randint(2000, (2, 20000))
        regard.GraphAttention(4, heads=2)(torch.randn(2000, 4), edges).sum().backward()
        with torch.no_grad():
            regard.Attention("additive", query_dim=4, key_dim=4, hidden_dim=8)(*[torch.randn(2, 1500, 4)] * 2)
        print("torch._dynamo" in sys.modules)
        """
    )
    assert told.split() == ["False"]


def test_all_of_it_needs_torch_and_jaxtyping_and_nothing_else():
    """Also once every public name has been used, and the catalog has been read."""
    loaded = run(
        """
        import sys
        import torch, torch.utils.checkpoint, torch.nn.functional, jaxtyping
        before = {name.partition(".")[0] for name in sys.modules}
        import regard
        for name in regard.__all__:
            getattr(regard, name)
        list(regard.catalog.entries())
        after = {name.partition(".")[0] for name in sys.modules}
        print(*(after - before - set(sys.stdlib_module_names)))
        """
    )
    assert set(loaded.split()) == {"regard"}


def test_the_package_alone_does_not_even_load_torch():
    assert run("import sys, regard; print('torch' in sys.modules, regard.__version__)").startswith("False")


def test_names_are_there_when_asked_for():
    run(
        """
        import regard
        assert {"Attention", "record", "catalog", "__version__"} <= set(dir(regard))
        assert regard.observe.record is regard.record
        from regard import Attention, catalog
        assert catalog.find("additive").cls is regard.Additive
        assert set(regard.__all__) <= set(dir(regard))
        namespace = {}
        exec("from regard import *", namespace)
        assert namespace["Attention"] is Attention
        """
    )


def test_the_catalog_is_full_whatever_was_imported_first():
    sizes = {
        run(f"{first}; from regard.catalog import entries; print(len(list(entries())))")
        for first in ("import regard", "from regard.general.scores.bilinear import Dot", "import regard.catalog")
    }
    assert len(sizes) == 1


def test_a_name_that_does_not_exist_is_an_attribute_error():
    import regard

    with pytest.raises(AttributeError, match="module 'regard' has no attribute 'Atention'"):
        _ = regard.Atention


@pytest.mark.slow
def test_importing_costs_hardly_more_than_torch():
    """Of the processor's time, and at best: other processes may hold the cores for a while."""

    def seconds(code):
        def once():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run(code)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

        return min(once() for _ in range(6))

    assert seconds("import regard; regard.Attention") <= 1.15 * seconds("import torch")
