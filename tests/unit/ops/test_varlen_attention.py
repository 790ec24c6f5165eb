"""Attention without padding: sequence by sequence by definition; which devices have a kernel, without such a device."""

import runpy
import sys

import pytest
import torch

from exlm_cli.ops import varlen_attention as varlen
from exlm_cli.ops.varlen_attention import has_varlen_kernel, varlen_attention

CUDA, BF16 = torch.device("cuda"), torch.bfloat16


def test_each_row_reads_the_rows_of_its_own_sequence():
    """Softmax of scaled products, written out in float64; one sequence has a single row, one query less than rows."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 9, 2, 4, dtype=torch.float64)
    cu_queries, cu_keys = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 2, 3, 8], [0, 3, 4, 9]))
    mixed = varlen_attention(q[:8], k, v, cu_queries, cu_keys, 5, 0.0)
    for queries, rows in ((slice(0, 2), slice(0, 3)), (slice(2, 3), slice(3, 4)), (slice(3, 8), slice(4, 9))):
        for head in range(2):
            weights = (q[queries, head] @ k[rows, head].T / 2).softmax(-1)
            torch.testing.assert_close(mixed[queries, head], weights @ v[rows, head])


@pytest.mark.parametrize("is_installed", [True, False])
def test_torch_has_a_kernel_without_dropout_and_flash_attn_one_with_it(monkeypatch, is_installed):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(varlen, "flash_attn_varlen_func", varlen_attention if is_installed else None)
    assert has_varlen_kernel(CUDA, BF16, 64, 0.0)
    assert has_varlen_kernel(CUDA, BF16, 64, 0.1) == is_installed
    assert not has_varlen_kernel(torch.device("cpu"), BF16, 64, 0.0)
    assert not has_varlen_kernel(CUDA, None, 64, 0.0)
    assert not has_varlen_kernel(CUDA, BF16, 20, 0.0)
    assert not has_varlen_kernel(CUDA, BF16, 512, 0.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not has_varlen_kernel(CUDA, BF16, 64, 0.0)


def test_flash_attn_gets_its_own_arguments(monkeypatch):
    """As its `flash_attn_varlen_func` names them; on tensors without data, which no kernel reads."""
    given = []

    def record(*arguments, dropout_p):
        given.append((*arguments, dropout_p))
        return arguments[0]

    monkeypatch.setattr(varlen, "flash_attn_varlen_func", record)
    q, k, v = (torch.empty(9, 2, 8, device="meta") for _ in range(3))
    cu_queries, cu_keys = (torch.empty(4, dtype=torch.int32, device="meta") for _ in range(2))
    varlen_attention(q, k, v, cu_queries, cu_keys, 5, 0.1)
    assert [*map(id, given[0][:5])] == [*map(id, (q, k, v, cu_queries, cu_keys))]
    assert given[0][5:] == (5, 5, 0.1)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('undefined symbol')", "undefined symbol"),
        ("import no_such_dependency", "no_such_dependency"),
        ("", "no attribute 'flash_attn_varlen_func'"),
    ],
)
def test_a_flash_attn_that_does_not_work_is_not_used_and_a_warning_says_so(tmp_path, monkeypatch, caplog, code, reason):
    """Built for another torch, or of a version without the function; the module of this process stays as it is."""
    (tmp_path / "flash_attn.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    del sys.modules["flash_attn"]
    assert runpy.run_path(varlen.__file__)["flash_attn_varlen_func"] is None
    (warning,) = caplog.messages
    assert warning.startswith("flash_attn is installed and not used: ")
    assert reason in warning
