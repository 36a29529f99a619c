"""The import hook: the lines that it rewrites, that nothing else changes, and the gaps it closes."""

import ast
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_eqlen.megatron_cpu import cuda_namespace, finder, gaps
from tests.kit.distributed import run_ranks
from tests.kit.marks import EACH_WEEK

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is rewritten")

REWRITTEN = {
    "torch.cuda.current_device()": torch.device("cpu"),
    "torch.zeros(2, device='cuda:0').device": torch.device("cpu"),
    "torch.zeros(2, device=torch.cuda.current_device()).cuda().device": torch.device("cpu"),
    "torch.zeros(2).cuda(non_blocking=True).device.type": "cpu",
    "torch.zeros(2).is_cuda": True,
    "torch.cuda.Stream() == torch.cuda.current_stream()": True,
    "torch.cuda.is_available()": False,
    "'torch.cuda.FloatTensor'": "torch.FloatTensor",
    "'no cuda here'": "no cuda here",
    "torch.compile(abs)": abs,
    "torch.compile(dynamic=True)(abs)": abs,
}


@needs_no_gpu
@pytest.mark.parametrize("expression", REWRITTEN)
def test_cuda_means_cpu(expression):
    module = f'"""Docstring."""\nfrom __future__ import annotations\nimport torch\nvalue = {expression}\n'
    scope: dict = {}
    exec(compile(finder.without_cuda(module.encode(), "example.py"), "example.py", "exec"), scope)
    assert scope["value"] == REWRITTEN[expression]


def test_a_rewritten_module_keeps_docstring_future_imports_and_lines():
    text = b'"""Docstring."""\nfrom __future__ import annotations\nfrom torch.cuda import Stream\nx = 1\n'
    tree = finder.without_cuda(text, "example.py")
    assert ast.get_docstring(tree) == "Docstring."
    assert tree.body[1].module == "__future__"
    assert tree.body[-2].module == cuda_namespace.__name__
    assert tree.body[-1].lineno == 4


def test_rewritten_code_is_compiled_once_and_kept_apart_from_pythons_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    path = tmp_path / "example.py"
    path.write_text("import torch\nvalue = torch.cuda.current_device")
    rewritten, plain = (finder.MegatronLoader("example", str(path), rewrite) for rewrite in (True, False))
    assert finder.ALIAS in rewritten.get_code("example").co_names
    assert finder.ALIAS not in plain.get_code("example").co_names
    assert len(list(tmp_path.rglob("*.pyc"))) == 2
    monkeypatch.setattr(finder, "without_cuda", None)  # not called again
    assert finder.ALIAS in rewritten.get_code("example").co_names


def outside() -> tuple[bool, bool]:
    """Return (torch.cuda is torch's own, Megatron's is the namespace) after Megatron's import."""
    import megatron.core.parallel_state as megatron

    ours = vars(megatron)[finder.ALIAS] is cuda_namespace
    return torch.cuda.Stream is not cuda_namespace.Stream and torch.cuda.is_available() is False, ours


@needs_no_gpu
def test_only_megatron_sees_the_namespace():
    assert run_ranks(1, outside) == [(True, True)]


def test_importing_megatron_first_is_an_error_not_a_surprise():
    code = "import sys; sys.modules['megatron.core'] = sys; import megatron_eqlen.models"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "megatron.core was imported before megatron_eqlen" in result.stderr


@EACH_WEEK  # test_packages.py has most of it, without the imports
@pytest.mark.slow
def test_broken_optional_packages_are_said_and_do_not_stop_the_import(tmp_path):
    """Megatron-Core itself would end with the OSError."""
    for name in ("transformer_engine", "fla", "apex"):
        tmp_path.joinpath(f"{name}.py").write_text(f"raise OSError('lib{name}.so: no such file')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import megatron_eqlen.models.build"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for name in ("transformer_engine", "fla", "apex"):
        assert result.stderr.count(f"(OSError: lib{name}.so: no such file)") == 1


def test_another_megatron_version_is_said_aloud():
    with pytest.warns(UserWarning, match=r"Megatron-Core 0\.99 found; its gaps are known for 0\.19\.2"):
        gaps.close(SimpleNamespace(__name__="megatron.core", __version__="0.99"), on_cpu=False)
