"""
When does a small language model need QK-norm? One GPT, one run, one log.

    python qkgpt.py --qknorm 1 --lr 1e-2 --n_layer 8   # a cell of the paper's grid, on TinyStories
    python qkgpt.py --qknorm 1 --dataset toy           # on the shipped corpus, without a network
    python qkgpt.py --selftest 1                       # does this device compute correctly?
    bash sweep.sh quick                                # a small grid, from nothing to its figures

The model is Karpathy's nanoGPT (https://github.com/karpathy/nanoGPT, MIT), rewritten with its names, shapes,
random draws and defaults; with --qknorm 0 it equals nanoGPT bit for bit. `grep -n '# qknorm' qkgpt.py` shows
the experiment. The order is nanoGPT's: model, configuration, data, training, measurement, log.
"""

import argparse
import copy
import ctypes
import dataclasses
import fcntl
import hashlib
import http.client
import itertools
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

HERE = os.path.dirname(os.path.abspath(__file__))

# glibc returns every large tensor to the kernel when it is freed; a tenth of a CPU step would be page faults
if platform.libc_ver()[0] == 'glibc':
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in malloc.h
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**30)


class UsageError(Exception):
    """Bad input; the message names the field, its value and what would be right. Exit status 2."""


class CellBusy(Exception):
    """Another process is running this cell. Exit status 3."""


# -----------------------------------------------------------------------------
# model: nanoGPT's model.py

class LayerNorm(nn.Module):
    """LayerNorm whose bias is optional."""

    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


def rms_norm(x):  # qknorm: x / rms(x) over the last axis, without a gain: both arms have the same parameters
    y = x.to(torch.promote_types(x.dtype, torch.float32))  # qknorm: in float32 at least
    mean_square = y.square().mean(-1, keepdim=True)  # qknorm
    return (y * torch.rsqrt(mean_square + 1e-6)).to(x.dtype)  # qknorm


class CausalSelfAttention(nn.Module):

    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        # query, key and value of all heads in one matrix
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout
        self.qknorm = config.qknorm

    def qkv(self, x):
        """(B, T, C) -> q, k, v, each (B, nh, T, hs), as the dot products see them."""
        B, T, C = x.size()
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                   for part in self.c_attn(x).split(self.n_embd, dim=2))  # (B, nh, T, hs)
        if self.qknorm:  # qknorm: |q| = |k| = sqrt(hs), so that no attention logit exceeds sqrt(hs)
            q, k = rms_norm(q), rms_norm(k)  # qknorm
        return q, k, v

    def forward(self, x):
        B, T, C = x.size()  # batch size, sequence length, n_embd
        q, k, v = self.qkv(x)
        dropout = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).contiguous().view(B, T, C)  # heads side by side again
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    qknorm: bool = False  # qknorm: last and off, so that nanoGPT's calls mean what they mean there


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # weight tying

        self.apply(self._init_weights)
        # GPT-2's scaled init of the projections into the residual stream, two per layer
        for pn, p in self.named_parameters():
            if pn.endswith('c_proj.weight'):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def get_num_params(self, non_embedding=True):
        """Parameters, by default without wpe. The token embedding counts: tied, it is also the head."""
        n_params = sum(p.numel() for p in self.parameters())
        if non_embedding:
            n_params -= self.transformer.wpe.weight.numel()
        return n_params

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        """idx, targets (B, T) int64 -> logits, loss. Without targets: the last position's logits, None."""
        B, T = idx.size()
        assert T <= self.config.block_size, f'sequence of length {T}, block_size is {self.config.block_size}'
        pos = torch.arange(T, dtype=torch.long, device=idx.device)  # (T,)

        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))  # (B, T, C)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)

        if targets is None:
            return self.lm_head(x[:, [-1], :]), None  # (B, 1, V)
        logits = self.lm_head(x)  # (B, T, V)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """AdamW; matrices and embeddings are decayed, biases and LayerNorm gains are not."""
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [dict(params=[p for p in params if p.dim() >= 2], weight_decay=weight_decay),
                  dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)]
        fused = True if device_type == 'cuda' else None
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """idx (B, T) -> (B, T + max_new_tokens); each new token sees the last block_size tokens."""
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size:])
            logits = logits[:, -1, :] / temperature  # (B, V)
            if top_k is not None:
                kth = torch.topk(logits, min(top_k, logits.size(-1))).values[:, [-1]]
                logits = logits.masked_fill(logits < kth, float('-inf'))
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)), dim=1)
        return idx


# -----------------------------------------------------------------------------
# configuration: every field is a flag; the defaults are a cell of the paper's grid

def flag(default, help):
    return dataclasses.field(default=default, metadata=dict(help=help))


@dataclass
class Config(GPTConfig):
    # model
    qknorm: bool = flag(False, 'the experiment: RMS-normalise q and k of each head, without a gain (0 or 1)')
    n_layer: int = flag(8, 'blocks')
    n_head: int = flag(5, 'attention heads')
    n_embd: int = flag(320, 'width')
    block_size: int = flag(256, 'context length (tokens)')
    vocab_size: int = flag(0, "257 (bytes) to 50257 (all of GPT-2's BPE); 0: the data set's own")
    dropout: float = flag(0.0, 'probability')
    bias: bool = flag(False, 'biases in Linear and LayerNorm (0 or 1)')
    # data
    dataset: str = flag('tinystories', 'tinystories, tinystories-5m, toy, or the path of a .txt file')
    data_dir: str = flag(os.path.join(HERE, 'data'), 'folder of the data: raw/ and the prepared .bin files')
    # optimisation
    lr: float = flag(1e-3, 'peak learning rate')
    min_lr: float = flag(1e-5, 'learning rate at the end; absolute, so that every learning rate anneals')
    weight_decay: float = flag(0.1, "AdamW's; a step shrinks the weights by lr * weight_decay")
    independent_wd: bool = flag(False, 'give AdamW weight_decay / lr: shrink without lr (0 or 1)')
    beta1: float = flag(0.9, "AdamW's")
    beta2: float = flag(0.95, "AdamW's")
    grad_clip: float = flag(1.0, 'largest gradient norm; 0: no clipping')
    warmup_ratio: float = flag(0.3, 'share of the steps with a rising learning rate')
    max_iters: int = flag(1000, 'updates (steps)')
    batch_size: int = flag(64, 'sequences per micro-batch')
    gradient_accumulation_steps: int = flag(1, 'micro-batches per step')
    # evaluation and log
    eval_interval: int = flag(100, 'steps between evaluations')
    eval_iters: int = flag(10, 'validation batches per evaluation, the same ones every time')
    log_interval: int = flag(10, 'steps between rows of the log')
    # run
    seed: int = flag(1337, 'of the initial weights and of the batches')
    device: str = flag('auto', 'auto (cuda, else mps, else cpu), cpu, mps, cuda or cuda:N')
    dtype: str = flag('float32', 'float32, tf32 (CUDA only) or bfloat16 (autocast)')
    compile: bool = flag(False, 'torch.compile the model (0 or 1)')
    threads: int = flag(0, "CPU threads; 0: PyTorch's choice")
    out_dir: str = flag(os.path.join(HERE, 'logs', 'runs'), 'folder of the log')
    overwrite: bool = flag(False, 'replace a finished log of the same name (0 or 1)')
    prepare: bool = flag(False, 'only download and prepare the data (0 or 1)')
    dry_run: bool = flag(False, 'only show what would be run, and how long it would take (0 or 1)')
    selftest: bool = flag(False, 'only check the device at the configured sizes (0 or 1)')


# flags that say where and how a run is done, not what is computed: no part of its identity
CIRCUMSTANCES = ('data_dir', 'threads', 'out_dir', 'overwrite', 'prepare', 'dry_run', 'selftest')


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def switch(text):
    if text not in ('0', '1'):
        raise argparse.ArgumentTypeError(f'{text}: 0 or 1')
    return text == '1'


def parse_args(argv):
    """Command line -> Config. Raises UsageError."""
    parser = Parser(prog='qkgpt.py', description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Config):
        is_switch, default = field.type is bool, field.default
        shown = int(default) if is_switch else default
        shown = os.path.relpath(default, HERE) if field.name in ('data_dir', 'out_dir') else shown
        parser.add_argument('--' + field.name, default=default, type=switch if is_switch else field.type,
                            metavar='01' if is_switch else field.type.__name__,
                            help=f'{field.metadata["help"]} [{shown}]'.replace('%', '%%'))
    return Config(**vars(parser.parse_args(argv)))


def check_config(cfg):
    """Raises UsageError for a value that no run could use; vocab_size is checked with the data."""
    def need(name, ok, right):
        if not ok:
            raise UsageError(f'{name}: {getattr(cfg, name)}: {right}')

    for name in ('n_layer', 'n_head', 'n_embd', 'batch_size', 'gradient_accumulation_steps', 'eval_iters'):
        need(name, 1 <= getattr(cfg, name) <= 2**20, 'from 1 to 2**20')
    for name in ('max_iters', 'eval_interval', 'log_interval'):
        need(name, 1 <= getattr(cfg, name) <= 2**40, 'from 1 to 2**40')
    for name in ('dropout', 'beta1', 'beta2'):
        need(name, 0 <= getattr(cfg, name) < 1, 'at least 0 and below 1')
    for name in ('min_lr', 'weight_decay', 'grad_clip'):
        need(name, 0 <= getattr(cfg, name) < math.inf, 'at least 0 and finite')
    need('n_embd', cfg.n_embd % cfg.n_head == 0, f'a multiple of n_head ({cfg.n_head})')
    need('block_size', 2 <= cfg.block_size <= 2**20, 'from 2 to 2**20')
    need('lr', 0 < cfg.lr <= 1e20 and cfg.min_lr <= cfg.lr,
         f'above 0, at most 1e20, and not below min_lr ({cfg.min_lr:g})')
    need('warmup_ratio', 0 <= cfg.warmup_ratio <= 1, 'from 0 to 1')
    need('seed', 0 <= cfg.seed < 2**63, 'from 0 to 2**63 - 1')
    need('threads', 0 <= cfg.threads <= 1024, "from 0 (PyTorch's choice) to 1024")
    need('dtype', cfg.dtype in ('float32', 'tf32', 'bfloat16'), 'float32, tf32 or bfloat16')
    need('dtype', cfg.dtype != 'tf32' or cfg.device.startswith('cuda'),
         f'tf32 needs CUDA, the device is {cfg.device}')


def resolve_device(name):
    """'auto' -> the device it stands for. Raises UsageError for a device that is not there."""
    available = ['cuda'] if torch.cuda.is_available() else []
    available += [f'cuda:{i}' for i in range(torch.cuda.device_count())]
    available += ['mps'] if torch.backends.mps.is_available() else []
    available += ['cpu']
    if name == 'auto':
        return available[0]
    if name not in available:
        raise UsageError(f'device: {name}: auto or one of those on this machine: {", ".join(available)}')
    return name


def setup_device(cfg):
    """Threads and arithmetic of the process: no TF32 unless asked for, and deterministic CUDA kernels."""
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    torch.set_float32_matmul_precision('high' if cfg.dtype == 'tf32' else 'highest')
    if cfg.device.startswith('cuda'):
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


def autocast(cfg):
    return torch.autocast(cfg.device.split(':')[0], torch.bfloat16, enabled=cfg.dtype == 'bfloat16')


# -----------------------------------------------------------------------------
# data: texts -> train.bin, val.bin (uint16, little endian) and meta.json in <data_dir>/<name>_<vocab_size>/

END = '<|endoftext|>'  # between stories in the text, and the last id of every vocabulary
BASE_URL = ('https://huggingface.co/datasets/roneneldan/TinyStories/resolve/'
            'f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/')
# A source is the first `size` bytes of BASE_URL + url, kept as <data_dir>/raw/<file>, or a local path. cut:
# is its first, its last story a fragment? val: the second source, or the only one's last tenth.
DATASETS = {
    'tinystories': dict(vocab_size=8192, sources=[
        dict(file='TinyStoriesV2-GPT4-train.txt', url='TinyStoriesV2-GPT4-train.txt', size=2227753162,
             cut=(0, 1), sha256='6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443'),
        dict(file='TinyStoriesV2-GPT4-valid.txt', url='TinyStoriesV2-GPT4-valid.txt', size=22502601,
             cut=(1, 0), sha256='6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d')]),
    'tinystories-5m': dict(vocab_size=2048, sources=[
        dict(file='TinyStoriesV2-GPT4-valid.first5242880bytes.txt', url='TinyStoriesV2-GPT4-valid.txt',
             size=5242880, cut=(1, 1),
             sha256='7cc2577b9e1f9ed703b13ca651103bf421c91912fcbcb2d024213858e0981d87')]),
    'toy': dict(vocab_size=257, sources=[
        dict(path=os.path.join(HERE, 'data', 'toy_stories.txt'), cut=(0, 0),
             sha256='6cf98cebca147e82fef483a4c9e6f14725f64555e941c3c07f51413cf92f67aa')]),
}


def sha256_file(path):
    with open(path, 'rb') as f:
        return hashlib.file_digest(f, 'sha256').hexdigest()


def progress(text, end=False):
    """A line on stderr: rewritten in place on a terminal, elsewhere printed only at its end."""
    if sys.stderr.isatty():
        print(f'\r{text}\033[K', end='\n' if end else '', file=sys.stderr, flush=True)
    elif end:
        print(text, file=sys.stderr, flush=True)


def get_dataset(dataset, vocab_size, data_dir):
    """-> (sources, vocab_size, folder of the prepared data). Writes and downloads nothing.

    dataset is a name of DATASETS or the path of a UTF-8 text file, whose folder carries eight digits of its
    sha256. vocab_size 0 means the data set's own; a file's is 257.
    """
    if dataset.endswith('.txt') or os.sep in dataset:
        try:
            source = dict(path=dataset, cut=(0, 0), sha256=sha256_file(dataset))
        except OSError as error:
            raise UsageError(f'dataset: {dataset}: a text file that can be read ({error.strerror})') from None
        stem = os.path.splitext(os.path.basename(dataset))[0]
        name, sources, default = f'{stem}-{source["sha256"][:8]}', [source], 257
    elif dataset in DATASETS:
        name, sources, default = dataset, DATASETS[dataset]['sources'], DATASETS[dataset]['vocab_size']
    else:
        raise UsageError(f'dataset: {dataset}: one of {", ".join(DATASETS)}, or the path of a .txt file')
    vocab_size = vocab_size or default
    if not 257 <= vocab_size <= 50257:
        raise UsageError(f'vocab_size: {vocab_size}: from 257 (plain bytes) to 50257 (all of GPT-2), or 0')
    return sources, vocab_size, os.path.join(data_dir, f'{name}_{vocab_size}')


def download(url, path, size, sha256):
    """Fetch the first `size` bytes at url to path, which appears only once its sha256 is verified.

    What has arrived stays in path.part, and the next try or start resumes there. A cut connection, 429 and
    5xx are retried after 1, 2, 4, ... s or the server's Retry-After; UsageError after six tries in vain.
    """
    def have():
        return os.path.getsize(part) if os.path.exists(part) else 0

    part, name = path + '.part', os.path.basename(path)
    by_hand = f'try again later, or save the file as {path} yourself'
    best, tries = have(), 0
    while have() < size:
        wait, problem = 2 ** tries, 'the connection was cut'
        request = urllib.request.Request(url, headers={'Range': f'bytes={have()}-{size - 1}'})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                receive(response, part, have(), size)
        except urllib.error.HTTPError as error:
            problem = f'HTTP {error.code} {error.reason}'
            if error.code == 416:  # part is longer than the server's file
                os.remove(part)
            if error.code != 429 and error.code < 500:
                raise UsageError(f'dataset: {url}: {problem}; {by_hand}') from None
            if error.headers.get('Retry-After', '').isdigit():
                wait = int(error.headers['Retry-After'])
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            problem = f'no connection ({getattr(error, "reason", error)})'
        tries += 1
        if have() > best:
            best, tries, wait = have(), 0, 1
        if tries == 6:
            raise UsageError(f'dataset: {url}: {problem}; {by_hand}')
        if have() < size:
            progress(f'{name}: {problem} at {have() / 1e6:.1f} MB, going on in {wait} s', end=True)
            time.sleep(wait)
    if sha256_file(part) != sha256:
        os.remove(part)
        raise UsageError(f'dataset: {url}: not the published file, its sha256 differs (removed); {by_hand}')
    os.replace(part, path)
    progress(f'{name}: {size / 1e6:.1f} MB, sha256 verified', end=True)


def receive(response, part, have, size):
    """Append the response's body to part; write part anew if the server ignored the range."""
    if response.headers.get_content_type() == 'text/html':
        raise UsageError(f'dataset: {response.url}: the file, but a web page came (from a proxy?)')
    done = have if response.status == 206 else 0
    total = done + int(response.headers.get('Content-Length', size))
    if total < size:
        raise UsageError(f'dataset: {response.url}: not the published file: {total} bytes, not {size}')
    with open(part, 'ab' if done else 'wb') as f:
        while done < size and (block := response.read(min(1 << 20, size - done))):
            f.write(block)
            done += len(block)
            progress(f'{os.path.basename(part)}: {done / 1e6:.0f} of {size / 1e6:.0f} MB')


def get_text(source, data_dir):
    """-> path of the source's text, sha256 verified; downloaded if it is not there."""
    path = source.get('path') or os.path.join(data_dir, 'raw', source['file'])
    if 'url' in source and not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        download(BASE_URL + source['url'], path, source['size'], source['sha256'])
    elif not os.path.exists(path) or sha256_file(path) != source['sha256']:
        raise UsageError(f'dataset: {path}: missing, or not of sha256 {source["sha256"]}')
    return path


def get_tokenizer(vocab_size):
    """-> encode (stories -> uint16 ids, vocab_size - 1 after each story), itos (the bytes of each id).

    257 is plain bytes. Else the first vocab_size - 1 ranks of GPT-2's BPE: a merge joins only lower ranks,
    and the first 256 are the bytes, so they are a lossless BPE themselves.
    """
    if vocab_size == 257:
        def encode(stories):
            text = b''.join(story.encode() + b'\xff' for story in stories)  # 0xff never occurs in UTF-8
            ids = np.frombuffer(text, np.uint8).astype(np.uint16)
            ids[ids == 0xff] = 256
            return ids
        return encode, [bytes([i]) for i in range(256)] + [END.encode()]
    try:
        import tiktoken  # here, since nothing but preparing needs it
        gpt2 = tiktoken.get_encoding('gpt2')
    except ImportError:
        raise UsageError(f'vocab_size: {vocab_size}: 257 (bytes), or install the package tiktoken') from None
    except (OSError, ValueError) as error:
        raise UsageError(f'vocab_size: {vocab_size}: 257 (bytes), or GPT-2\'s files in TIKTOKEN_CACHE_DIR, '
                         f'since they cannot be downloaded ({type(error).__name__})') from None
    ranks = {token: rank for token, rank in gpt2._mergeable_ranks.items() if rank < vocab_size - 1}
    bpe = tiktoken.Encoding('gpt2_cut', pat_str=gpt2._pat_str, mergeable_ranks=ranks,
                            special_tokens={END: vocab_size - 1}, explicit_n_vocab=vocab_size)

    def encode(stories):  # encode_ordinary of each story, in one call: END keeps them apart
        text = ''.join(story + END for story in stories)
        return bpe.encode_to_numpy(text, allowed_special={END}).astype(np.uint16)
    return encode, sorted(ranks, key=ranks.get) + [END.encode()]


def read_stories(path, cut_start, cut_end):
    """Yield the stripped, non-empty texts between ENDs, reading a few MB at a time; all line ends become \\n.
    cut_start, cut_end: drop what stands before the first, after the last END."""
    rest = ''
    try:
        with open(path, encoding='utf-8') as f:
            while block := f.read(1 << 22):
                *stories, rest = (rest + block).split(END)
                yield from filter(None, map(str.strip, stories[cut_start:]))
                cut_start = cut_start and not stories
    except UnicodeDecodeError:
        raise UsageError(f'dataset: {path}: a text in UTF-8') from None
    if rest.strip() and not cut_start and not cut_end:
        yield rest.strip()


def split_stories(texts):
    """texts: the arguments of read_stories, of two texts or of one -> stories of train, of val.

    Of one text, the last tenth of its stories, at least one, is val. A single story, or a text without END,
    is cut at nine tenths of its characters.
    """
    if len(texts) == 2:
        return [read_stories(*text) for text in texts]
    n = sum(1 for _ in read_stories(*texts[0]))
    if n == 0:
        raise UsageError(f'dataset: {texts[0][0]}: a text that is not empty')
    if n == 1:
        story = next(read_stories(*texts[0]))
        n_train = len(story) * 9 // 10
        return [story[:n_train]], [story[n_train:]]
    n_train = n - max(1, n // 10)
    return (itertools.islice(read_stories(*texts[0]), n_train),
            itertools.islice(read_stories(*texts[0]), n_train, None))


def batches(stories, n_chars=1 << 18):
    """Lists of stories with n_chars characters or just over."""
    batch, n = [], 0
    for story in stories:
        batch.append(story)
        n += len(story)
        if n >= n_chars:
            yield batch
            batch, n = [], 0
    if batch:
        yield batch


def write_tokens(path, stories, encode, vocab_size):
    """Write the ids of the stories, encoded a few MB at a time on all cores. -> counts and sha256."""
    count, digest, todo = dict(stories=0, tokens=0, bytes=0), hashlib.sha256(), batches(stories)
    with open(path, 'wb') as f, ThreadPoolExecutor(os.cpu_count()) as pool:  # tiktoken leaves the GIL
        while window := list(itertools.islice(todo, 4 * os.cpu_count())):
            for batch, ids in zip(window, pool.map(encode, window)):
                if np.count_nonzero(ids == vocab_size - 1) != len(batch):
                    raise RuntimeError(f'{path}: not one end-of-text id per story')
                data = ids.astype('<u2').tobytes()
                f.write(data)
                digest.update(data)
                count['stories'] += len(batch)
                count['tokens'] += len(ids)
                count['bytes'] += sum(len(story.encode()) for story in batch)
            progress(f'{path}: {count["bytes"] / 1e6:.0f} MB of text encoded')
    progress('{}: {stories} stories, {tokens} tokens, {bytes} bytes of text'.format(path, **count), end=True)
    return dict(count, sha256=digest.hexdigest())


def content_sha256(meta):
    """The sha256 that stands for the data: both parts (counts and sha256) and the vocabulary."""
    return hashlib.sha256(json.dumps([meta['train'], meta['val'], meta['itos']]).encode()).hexdigest()


def prepare(dataset, vocab_size, data_dir):
    """-> the folder of train.bin, val.bin and meta.json, made if it does not exist.

    Written under another name, under a lock, and renamed when complete: a kill leaves nothing half done, and
    a second process waits for the first. meta.json: dataset, tokenizer, vocab_size, source (their sha256),
    train and val (stories, tokens, bytes of the stripped stories without END, sha256 of the .bin), itos (as
    latin-1), sha256 (content_sha256).
    """
    sources, vocab_size, folder = get_dataset(dataset, vocab_size, data_dir)
    if os.path.exists(folder):
        return folder
    encode, itos = get_tokenizer(vocab_size)  # it may fail: better before a long download
    try:
        os.makedirs(data_dir, exist_ok=True)
        lock = open(os.path.join(data_dir, '.lock'), 'w')
    except OSError as error:
        raise UsageError(f'data_dir: {data_dir}: a folder that can be written ({error.strerror})') from None
    with lock:
        progress(f'preparing {folder}', end=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(folder):  # another process made it while we waited
            return folder
        texts = [(get_text(source, data_dir), *source['cut']) for source in sources]
        partial = folder + '.partial'
        shutil.rmtree(partial, ignore_errors=True)  # left by a kill
        try:
            os.mkdir(partial)
            parts = {part: write_tokens(f'{partial}/{part}.bin', stories, encode, vocab_size)
                     for part, stories in zip(('train', 'val'), split_stories(texts))}
            meta = dict(dataset=dataset, tokenizer='bytes' if vocab_size == 257 else 'GPT-2 BPE, cut',
                        vocab_size=vocab_size, source=[source['sha256'] for source in sources], **parts,
                        itos=[token.decode('latin-1') for token in itos])
            with open(f'{partial}/meta.json', 'w') as f:
                json.dump(dict(meta, sha256=content_sha256(meta)), f)
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def load_data(dataset, vocab_size, data_dir, block_size):
    """-> (train, val, meta): the ids as memory-mapped uint16, prepared first if need be.

    The files are checked against meta.json, by sha256 (a second per gigabyte), so that the hash in a log is
    that of the data trained on. UsageError if they are damaged or too short for one block.
    """
    folder = prepare(dataset, vocab_size, data_dir)
    sources, vocab_size, _ = get_dataset(dataset, vocab_size, data_dir)

    def check(ok, path, problem):
        if not ok:
            raise UsageError(f'data_dir: {path}: {problem}; delete {folder}, the next start makes it again')

    path = os.path.join(folder, 'meta.json')
    try:
        with open(path) as f:
            meta = json.load(f)
        intact = (meta['sha256'] == content_sha256(meta)
                  and meta['vocab_size'] == len(meta['itos']) == vocab_size)
        check(meta['source'] == [source['sha256'] for source in sources], path, 'made from another text')
    except (OSError, ValueError, KeyError, TypeError):
        intact = False
    check(intact, path, 'missing or damaged')
    arrays = []
    for part in 'train', 'val':
        path, n_tokens = os.path.join(folder, f'{part}.bin'), meta[part]['tokens']
        check(os.path.isfile(path), path, 'missing')
        n_bytes = os.path.getsize(path)
        check(n_bytes == 2 * n_tokens, path, f'damaged, {n_bytes} bytes, not {2 * n_tokens}')
        digest, top = hashlib.sha256(), 0
        with open(path, 'rb') as f:
            while len(ids := np.fromfile(f, '<u2', 1 << 21)):
                digest.update(ids)
                top = max(top, int(ids.max()))
        check(digest.hexdigest() == meta[part]['sha256'], path, 'damaged, its sha256 differs')
        check(top < vocab_size, path, f'holds id {top}, not below vocab_size {vocab_size}')
        if n_tokens <= block_size + 1:
            raise UsageError(f'block_size: {block_size}: below {n_tokens - 1}, {path} has {n_tokens} tokens')
        arrays.append(np.memmap(path, dtype='<u2', mode='r'))
    return *arrays, meta


def decode(ids, meta):
    """The text of the ids; bytes that are not UTF-8 become U+FFFD."""
    return b''.join(meta['itos'][i].encode('latin-1') for i in ids).decode('utf-8', errors='replace')


# -----------------------------------------------------------------------------
# training

def get_windows(data, starts, cfg):
    """starts (B,) -> x, y (B, T) int64 on the device; y is x one token later."""
    block = data[starts[:, None] + np.arange(cfg.block_size + 1)].astype(np.int64)  # (B, T+1)
    block = torch.from_numpy(block)
    if cfg.device.startswith('cuda'):
        block = block.pin_memory().to(cfg.device, non_blocking=True)
    block = block.to(cfg.device)
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


def get_batch(data, generator, cfg):
    """The micro-batches of one step, drawn together: accumulation sees what the large batch sees."""
    n = cfg.batch_size * cfg.gradient_accumulation_steps
    starts = torch.randint(len(data) - cfg.block_size, (n,), generator=generator).numpy()
    return [get_windows(data, part, cfg) for part in np.split(starts, cfg.gradient_accumulation_steps)]


def val_windows(data, cfg):
    """Window starts (eval_iters, batch_size), the same in every cell; each batch spans all of data."""
    n = cfg.eval_iters * cfg.batch_size
    return (np.arange(n) * (len(data) - cfg.block_size) // n).reshape(cfg.batch_size, cfg.eval_iters).T


def get_lr(it, cfg):
    """Learning rate of update it = 0, 1, ...: nanoGPT's linear warm-up and cosine, over max_iters."""
    warmup_iters = round(cfg.warmup_ratio * cfg.max_iters)
    if it < warmup_iters:
        return cfg.lr * (it + 1) / (warmup_iters + 1)
    decay_ratio = (it - warmup_iters) / (cfg.max_iters - warmup_iters)
    return cfg.min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (cfg.lr - cfg.min_lr)


def build(cfg):
    """-> model, optimizer. The initial weights are drawn on the CPU: the same on all devices."""
    torch.manual_seed(cfg.seed)
    model = GPT(cfg).to(cfg.device)
    weight_decay = cfg.weight_decay / cfg.lr if cfg.independent_wd else cfg.weight_decay
    device_type = cfg.device.split(':')[0]
    return model, model.configure_optimizers(weight_decay, cfg.lr, (cfg.beta1, cfg.beta2), device_type)


def compiled(model, cfg):
    return torch.compile(model) if cfg.compile else model


def train_step(model, optimizer, lr, batches, cfg):
    """One update. -> loss, gradient norm before clipping, both on the device: nothing here waits for it."""
    for group in optimizer.param_groups:
        group['lr'] = lr
    losses = []
    for x, y in batches:
        with autocast(cfg):
            _, loss = model(x, y)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).mean(), norm


def summarise(history):
    """[(loss, norm), ...] of the steps since the last row -> mean loss, largest norm, number of finite steps.

    Steps after the first non-finite one do not count. Only here does training wait for the device.
    """
    values = torch.stack([torch.stack(pair) for pair in history]).cpu().double()  # (steps, 2)
    n_finite = int(values.isfinite().all(dim=1).long().cumprod(0).sum())
    values = values[:n_finite + 1]
    return values[:, 0].mean().item(), values[:, 1].amax().item(), n_finite


def train(model, optimizer, cfg, data, on_row):
    """Exactly max_iters updates, or fewer if loss or gradient norm becomes non-finite. -> the log's footer.

    Calls on_row(row, evals, train_s) for each row of the log; evals: step -> validation loss, nats per token.
    """
    train_data, val_data, meta = data
    training_model = compiled(model, cfg)
    generator = torch.Generator().manual_seed(cfg.seed)
    batches = get_batch(train_data, generator, cfg)
    history, evals, diverged_step, train_s = [], {}, None, 0.0
    start = resumed = time.perf_counter()

    for step in range(cfg.max_iters + 1):  # step = updates done
        evaluates = step % cfg.eval_interval == 0 or step == cfg.max_iters
        if evaluates or step % cfg.log_interval == 0:
            row = {}
            if history:
                row['train_loss'], row['grad_norm'], n_finite = summarise(history)
                if n_finite < len(history):
                    step = diverged_step = step - len(history) + n_finite + 1
                row['lr'] = get_lr(step - 1, cfg)
                history = []
            train_s += time.perf_counter() - resumed
            if evaluates and diverged_step is None:
                row.update(evaluate(model, val_data, meta, cfg))
                evals[step] = row['val_loss']
            resumed = time.perf_counter()
            row.update(step=step, tokens=step * tokens_per_iter(cfg), seconds=resumed - start)
            on_row(row, evals, train_s)
        if step == cfg.max_iters or diverged_step is not None:
            break
        history.append(train_step(training_model, optimizer, get_lr(step, cfg), batches, cfg))
        batches = get_batch(train_data, generator, cfg)  # drawn while the device is still busy

    wall_s = time.perf_counter() - start
    if diverged_step is None and not math.isfinite(evals[step]):
        diverged_step = step
    final = evals[step] if diverged_step is None else math.nan
    best_step = min(evals, key=lambda step: (math.isnan(evals[step]), evals[step]))
    return dict(status='ok' if diverged_step is None else 'diverged', step=step, diverged_step=diverged_step,
                initial_val_loss=evals[0], final_val_loss=final, final_val_ppl=perplexity(final),
                final_val_bpb=bits_per_byte(final, meta), best_val_loss=evals[best_step], best_step=best_step,
                wall_s=round(wall_s, 3), train_s=round(train_s, 3),
                tokens_per_s=round(step * tokens_per_iter(cfg) / train_s),
                peak_memory_mb=round(peak_memory_mb(cfg)))


# -----------------------------------------------------------------------------
# measurement: on fixed validation windows, apart from GPT.forward

def perplexity(loss):
    return math.nan if math.isnan(loss) else math.exp(min(loss, 700.0))  # exp(710) overflows


def bits_per_byte(loss, meta):
    """Nats per token -> bits per byte of the validation text: comparable between vocabularies."""
    return loss / math.log(2) * meta['val']['tokens'] / meta['val']['bytes']


@torch.no_grad()
def evaluate(model, val_data, meta, cfg):
    """Validation loss (nats per token) over all windows; the probes on the first batch of them."""
    model.eval()
    windows, losses = val_windows(val_data, cfg), []
    for starts in windows:
        x, y = get_windows(val_data, starts, cfg)
        with autocast(cfg):
            losses.append(model(x, y)[1].float())
    loss = torch.stack(losses).cpu().double().mean().item()
    measured = probe(model, get_windows(val_data, windows[0], cfg)[0])
    model.train()
    return dict(val_loss=loss, val_ppl=perplexity(loss), val_bpb=bits_per_byte(loss, meta), **measured)


def attention_stats(logits):
    """q.k / sqrt(hs), (B, nh, T, T) -> max_logit, entropy, entropy_norm, sink of causal pairs.

    max_logit: largest |logit| (Wortsman et al. 2023, section 3.1.1). entropy: nats, mean over queries t >= 2
    (Zhai et al. 2023, section 3; the first query has no choice). entropy_norm (nh,): mean of entropy / ln t,
    1 if uniform. sink: mean attention to the first token (Gu et al. 2024).
    """
    T = logits.size(-1)
    future = torch.ones(T, T, dtype=torch.bool, device=logits.device).triu(1)
    max_logit = logits.masked_fill(future, 0.0).abs().amax()
    p = F.softmax(logits.masked_fill(future, float('-inf')), dim=-1)  # (B, nh, T, T)
    entropy = -torch.xlogy(p, p).sum(-1)[:, :, 1:]  # (B, nh, T-1)
    log_t = torch.arange(2, T + 1, device=logits.device).log()  # (T-1,)
    return max_logit, entropy.mean(), (entropy / log_t).mean(dim=(0, 2)), p[..., 0].mean()


def kurtosis(x):
    """(B, T, C) -> mean over tokens of m4 / m2^2 across C, uncentred: Gaussian 3, one-hot C.

    Per token, as in the public IMU-1 code; He et al. (2024) pool over tokens instead.
    """
    square = x.square()
    return (square / square.mean(-1, keepdim=True)).square().mean()  # divided first: x^4 would overflow


@torch.no_grad()
def probe(model, idx):
    """The log's columns attn_entropy to log_z, on idx (B, T), without autocast."""
    pos = torch.arange(idx.size(1), device=idx.device)
    x = model.transformer.wte(idx) + model.transformer.wpe(pos)  # (B, T, C)
    stats, kurt = [], []
    for block in model.transformer.h:
        q, k, _ = block.attn.qkv(block.ln_1(x))  # (B, nh, T, hs)
        stats.append(attention_stats(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))))
        x = block(x)
        kurt.append(kurtosis(x))
    log_z = torch.logsumexp(model.lm_head(model.transformer.ln_f(x)), dim=-1)  # (B, T)
    max_logit, entropy, entropy_norm, sink, kurt = map(torch.stack, (*zip(*stats), kurt))  # block by block
    measured = dict(attn_entropy=entropy.mean(), attn_entropy_norm=entropy_norm.mean(),
                    attn_entropy_min=entropy_norm.amin(), max_logit=max_logit.amax(),
                    max_logit_0=max_logit[0], kurtosis=kurt.amax(), kurtosis_last=kurt[-1],
                    sink=sink.mean(), log_z=log_z.mean())
    return dict(zip(measured, torch.stack(list(measured.values())).tolist()))


def peak_memory_mb(cfg):
    """Of this process on the CPU, of PyTorch's allocator on an accelerator (MPS: at this moment)."""
    if cfg.device.startswith('cuda'):
        return torch.cuda.max_memory_allocated() / 1e6
    if cfg.device == 'mps':
        return torch.mps.driver_allocated_memory() / 1e6
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


# -----------------------------------------------------------------------------
# log: a JSON line, a CSV table, a JSON line; the README describes every column

COLUMNS = ('step', 'tokens', 'lr', 'train_loss', 'grad_norm', 'val_loss', 'val_ppl', 'val_bpb',
           'attn_entropy', 'attn_entropy_norm', 'attn_entropy_min', 'max_logit', 'max_logit_0',
           'kurtosis', 'kurtosis_last', 'sink', 'log_z', 'seconds')


def run_name(cfg):
    return f'L{cfg.n_layer}_lr{cfg.lr:g}_qk{cfg.qknorm:d}_s{cfg.seed}'


def csv_line(row):
    """A column that was not measured is empty; nan and inf are what was measured."""
    return ','.join(f'{row[name]:.9g}' if isinstance(row.get(name), float) else str(row.get(name, ''))
                    for name in COLUMNS)


def json_line(values):
    """JSON knows no nan: what is not finite becomes null."""
    return json.dumps({key: None if isinstance(value, float) and not math.isfinite(value) else value
                       for key, value in values.items()})


def git_commit():
    """Commit of this folder, '-dirty' if it was changed; None without git or outside a clone."""
    if not os.path.exists(os.path.join(HERE, '.git')):  # git would take an enclosing folder's
        return None
    try:
        git = ['git', f'--git-dir={HERE}/.git', f'--work-tree={HERE}']  # stronger than GIT_DIR
        return subprocess.run([*git, 'describe', '--always', '--dirty', '--exclude', '*'],
                              capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def processor_name(device):
    """Of the GPU, or else of the CPU; never the name of the host."""
    if device.startswith('cuda'):
        return torch.cuda.get_device_name(device)
    if sys.platform == 'darwin':
        return subprocess.check_output(['sysctl', '-n', 'machdep.cpu.brand_string'], text=True).strip()
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as f:
            for line in f:
                if line.startswith('model name'):
                    return line.split(':', 1)[1].strip()
    return platform.machine()


def identity(cfg):
    """The configuration without its circumstances: two logs of one cell agree in it."""
    return {name: value for name, value in dataclasses.asdict(cfg).items() if name not in CIRCUMSTANCES}


def header(cfg, model, meta):
    data = dict(dataset=cfg.dataset, sha256=meta['sha256'], train_tokens=meta['train']['tokens'],
                val_tokens=meta['val']['tokens'], val_bytes=meta['val']['bytes'])
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__,
                    platform=f'{platform.system()} {platform.machine()}')
    return dict(run=run_name(cfg), config=identity(cfg), code=sha256_file(__file__), data=data,
                **param_counts(model), tokens_per_iter=tokens_per_iter(cfg), git=git_commit(),
                versions=versions, processor=processor_name(cfg.device), threads=torch.get_num_threads(),
                dtype=cfg.dtype + (' (autocast)' if cfg.dtype == 'bfloat16' else ''),
                start=time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()))


def param_counts(model):
    wte, wpe = model.transformer.wte.weight.numel(), model.transformer.wpe.weight.numel()
    n_params = model.get_num_params(non_embedding=False)
    return dict(n_params=n_params, n_params_nonemb=n_params - wte - wpe)


def tokens_per_iter(cfg):
    return cfg.batch_size * cfg.gradient_accumulation_steps * cfg.block_size


def finished(path, wanted):
    """-> footer of the log at path, or None. UsageError if it has not the header wanted."""
    if not os.path.exists(path):
        return None
    try:
        with open(path) as f:
            lines = f.read().splitlines()
        found, last = json.loads(lines[0][2:]), json.loads(lines[-1][2:])
        pairs = [(name, found['config'].get(name), value) for name, value in wanted['config'].items()]
        pairs += [('code', found['code'], wanted['code']),
                  ('data', found['data']['sha256'], wanted['data']['sha256'])]
        if 'status' not in last:
            raise ValueError
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, IsADirectoryError):
        raise UsageError(f'out_dir: {path}: not a finished log; remove it, or give --overwrite 1') from None
    other = [f'{name} {old} (now {new})' for name, old, new in pairs if old != new]
    if other:
        raise UsageError(f'out_dir: {path}: was run with {", ".join(other)}; '
                         'give another --out_dir, or --overwrite 1')
    return last


def check_writable(folder):
    """UsageError if folder, or what there is of it, cannot be written. Writes nothing."""
    there = os.path.abspath(folder)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f'out_dir: {folder}: a folder that can be written')


def is_at(f, path):
    """Is path still the name of this open file?"""
    try:
        return os.path.samestat(os.fstat(f.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def claim(path):
    """Open path.partial, empty and locked. Raises CellBusy, or UsageError where it cannot be written."""
    partial = path + '.partial'
    if os.path.isdir(path):
        raise UsageError(f'out_dir: {path}: a log, but a folder has its name')
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        f = open(partial, 'a')  # not 'w': it may be another's
    except OSError as error:
        raise UsageError(f'out_dir: {os.path.dirname(path)}: a folder that can be written '
                         f'({error.strerror})') from None
    try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = is_at(f, partial)  # False: another has just renamed it
    except BlockingIOError:
        ours = False
    if not ours:
        raise CellBusy(f'{partial}: another process is running this cell')
    f.truncate(0)
    return f


def write_line(f, line):
    """Flushed at once: a kill leaves whole lines."""
    f.write(line + '\n')
    f.flush()


def progress_line(cfg, row, evals, train_s):
    step = row['step']
    parts = [run_name(cfg), f'{step}/{cfg.max_iters} {100 * step // cfg.max_iters}%']
    losses = f'val {evals[max(evals)]:.3f}'
    parts.append(f'loss {row["train_loss"]:.3f} {losses}' if step else losses)
    if 'max_logit' in row:
        parts.append(f'max logit {row["max_logit"]:.3g}')
    if step:
        left = (cfg.max_iters - step) * row['seconds'] / step
        parts += [f'{step * tokens_per_iter(cfg) / train_s / 1e3:.1f}k tok/s', f'{left:.0f} s left']
    return ' | '.join(parts)


# -----------------------------------------------------------------------------
# the three things one can ask for: a run, a dry run, a self-test

def run(cfg):
    """Train one cell into its log, unless it is there."""
    path = os.path.join(cfg.out_dir, run_name(cfg) + '.csv')
    if cfg.overwrite or not os.path.exists(path):
        check_writable(cfg.out_dir)  # before a long download
    data = load_data(cfg.dataset, cfg.vocab_size, cfg.data_dir, cfg.block_size)
    meta = data[2]
    cfg.vocab_size = meta['vocab_size']
    model, optimizer = build(cfg)
    head = header(cfg, model, meta)

    result = None if cfg.overwrite else finished(path, head)
    if result:
        print(f'{path}: complete, with this configuration; kept')
        print(json_line(dict(run=run_name(cfg), log=path, **result)))
        return
    log = claim(path)
    if os.path.exists(path) and not cfg.overwrite:  # finished by another process since we looked
        os.remove(log.name)
        raise CellBusy(f'{path}: another process has just finished this cell')
    terminal = sys.stdout.isatty()

    def on_row(row, evals, train_s):
        write_line(log, csv_line(row))
        line = progress_line(cfg, row, evals, train_s)
        if terminal:
            print(f'\r{line[:shutil.get_terminal_size().columns - 1]}\033[K', end='', flush=True)
        elif 'val_loss' in row:
            print(line, flush=True)

    print(f'{cfg.device} ({head["processor"]}), {head["dtype"]}, {head["threads"]} threads, '
          f'{head["n_params"] / 1e6:.2f}M parameters, log {path}')
    with log:
        write_line(log, '# ' + json_line(head))
        write_line(log, ','.join(COLUMNS))
        result = train(model, optimizer, cfg, data, on_row)
        write_line(log, '# ' + json_line(result))
        os.fsync(log.fileno())
        if not is_at(log, log.name):
            raise OSError(f'{log.name}: was removed while it was written')
        os.replace(log.name, path)

    if terminal:
        print()
    if result['status'] == 'ok':
        print('a sample:', sample_story(model, meta, cfg))
    print(json_line(dict(run=run_name(cfg), log=path, **result)))


def sample_story(model, meta, cfg, max_new_tokens=120):
    model.eval()
    end = cfg.vocab_size - 1  # <|endoftext|>
    start = torch.full((1, 1), end, device=cfg.device)
    idx = model.generate(start, max_new_tokens, temperature=0.8, top_k=50)
    ids = idx[0, 1:].tolist()
    return ' '.join(decode(ids[:ids.index(end)] if end in ids else ids, meta).split())


def dry_run(cfg):
    """Show what would be run, and estimate its time from a few steps on random tokens. Writes nothing."""
    _, cfg.vocab_size, folder = get_dataset(cfg.dataset, cfg.vocab_size, cfg.data_dir)
    data_sha256 = f'not prepared yet: {folder}'
    if os.path.exists(folder):
        data_sha256 = load_data(cfg.dataset, cfg.vocab_size, cfg.data_dir, cfg.block_size)[2]['sha256']
    model, optimizer = build(cfg)
    training_model = compiled(model, cfg)
    noise = np.random.default_rng(0).integers(cfg.vocab_size, size=8 * cfg.block_size, dtype=np.uint16)
    generator, seconds = torch.Generator().manual_seed(0), []
    for _ in range(4):  # the first one also warms up
        start = time.perf_counter()
        loss, _ = train_step(training_model, optimizer, cfg.min_lr, get_batch(noise, generator, cfg), cfg)
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    # an evaluated batch costs a third of a trained one, the probes as much as two batches more
    n_evals = math.ceil(cfg.max_iters / cfg.eval_interval) + 1
    eval_steps = n_evals * (cfg.eval_iters + 2) / 3 / cfg.gradient_accumulation_steps
    tokens = cfg.max_iters * tokens_per_iter(cfg)
    # forward and backward: 6 per parameter and token, and the attention (PaLM, appendix B)
    flops = tokens * (6 * model.get_num_params() + 12 * cfg.n_layer * cfg.n_embd * cfg.block_size)
    summary = dict(run=run_name(cfg), log=os.path.join(cfg.out_dir, run_name(cfg) + '.csv'),
                   **param_counts(model), tokens=tokens, flops=flops, code=sha256_file(__file__),
                   data=data_sha256, processor=processor_name(cfg.device),
                   threads=torch.get_num_threads(),
                   estimated_s=round(sorted(seconds[1:])[1] * (cfg.max_iters + eval_steps), 1))
    for name, value in {**identity(cfg), **summary}.items():
        print(f'{name:30} {value}')
    print(json_line(summary))


def selftest(cfg):
    """Check the device at the configured sizes, both arms, against the CPU in float64. -> number of failures.

    Kernels have been silently wrong, on MPS above all: a causal mask that leaks in half precision, strided
    q, k, v, large Linear layers, AdamW on non-contiguous weights, out-of-range ids read as zeros.
    """
    _, cfg.vocab_size, _ = get_dataset(cfg.dataset, cfg.vocab_size, cfg.data_dir)
    # the device is tested, not the optimisation asked for
    cfg.lr, cfg.dropout, cfg.weight_decay, cfg.independent_wd, cfg.grad_clip = 1e-3, 0.0, 0.1, False, 1.0
    half = cfg.dtype != 'float32'
    failures = 0

    def report(name, value, limit):
        nonlocal failures
        ok = value <= limit  # False for nan
        failures += not ok
        print(f'{"ok" if ok else "FAILED":6} qknorm {cfg.qknorm:d}  {name:52} {value:9.2e}  '
              f'at most {limit:.0e}')

    def relative(found, wanted):  # of the largest entry wanted
        return ((found.cpu().double() - wanted).abs().max() / wanted.abs().max()).item()

    print(f'{cfg.device} ({processor_name(cfg.device)}), {cfg.dtype}, n_layer {cfg.n_layer}, '
          f'n_head {cfg.n_head}, n_embd {cfg.n_embd}, block_size {cfg.block_size}, '
          f'vocab_size {cfg.vocab_size}')
    for cfg.qknorm in (False, True):
        model, optimizer = build(cfg)
        reference = copy.deepcopy(model).cpu().double()
        model = compiled(model, cfg)
        generator = torch.Generator().manual_seed(cfg.seed)
        ids = torch.randint(cfg.vocab_size, (2, cfg.block_size + 1), generator=generator)
        x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        batch = [(x.to(cfg.device), y.to(cfg.device))]

        half_way = cfg.block_size // 2
        later = x.clone()
        later[:, half_way:] = (later[:, half_way:] + 1) % cfg.vocab_size
        with torch.no_grad(), autocast(cfg):
            before, after = (model(ids.to(cfg.device), batch[0][1])[0][:, :half_way] for ids in (x, later))
        report('causality: later tokens move earlier logits by', relative(after, before.cpu().double()), 1e-5)

        logits, loss = reference(x, y)
        loss.backward()
        with autocast(cfg):
            found_logits, found_loss = model(*batch[0])
        report('logits', relative(found_logits, logits), 5e-2 if half else 1e-4)
        report('loss', relative(found_loss, loss), 1e-2 if half else 1e-5)
        found_loss.backward()
        pairs = list(zip(model.parameters(), reference.parameters()))
        report('gradients, the worst tensor', max(relative(p.grad, q.grad) for p, q in pairs),
               0.2 if half else 1e-3)
        # AdamW's first step is lr * sign(gradient) wherever that is not tiny: hand both the same gradients
        before = [q.detach().clone() for q in reference.parameters()]
        for p, q in pairs:
            p.grad = q.grad.float().to(cfg.device)
        reference_optimizer = reference.configure_optimizers(
            optimizer.param_groups[0]['weight_decay'], cfg.lr, (cfg.beta1, cfg.beta2), 'cpu')
        optimizer.step()
        reference_optimizer.step()
        report('one AdamW step, the worst tensor', max(
            relative(p.detach().cpu().double() - w, q.detach() - w)
            for (p, q), w in zip(pairs, before)), 1e-2)

        model, optimizer = build(cfg)
        model = compiled(model, cfg)
        for _ in range(100):
            loss, _ = train_step(model, optimizer, 1e-3, batch, cfg)
        report('loss of one batch after 100 steps on it, over ln V',
               loss.item() / math.log(cfg.vocab_size), 0.5)

    # load_data refuses ids outside the vocabulary; would the device notice? (on CUDA it ends the process)
    if not cfg.device.startswith('cuda'):
        try:
            model(torch.full((1, 2), cfg.vocab_size, device=cfg.device))
            noticed = 'goes unnoticed on this device: only the check of the data guards against it'
        except (IndexError, RuntimeError):
            noticed = 'raises an error'
        print(f'note   an id outside the vocabulary {noticed}')
    return failures


def main(argv=None):
    """-> exit status: 0 done, diverged or complete already, 1 failure, 2 bad input, 3 busy, 130 Ctrl-C."""
    try:
        cfg = parse_args(argv)
        cfg.device = resolve_device(cfg.device)
        check_config(cfg)
        setup_device(cfg)
        if cfg.selftest:
            return 1 if selftest(cfg) else 0
        if cfg.dry_run:
            dry_run(cfg)
        elif cfg.prepare:
            meta = load_data(cfg.dataset, cfg.vocab_size, cfg.data_dir, cfg.block_size)[2]
            print(f'code {sha256_file(__file__)}\ndata {meta["sha256"]}\ndevice {cfg.device}')
        else:
            run(cfg)
        return 0
    except UsageError as error:
        status, message = 2, error
    except CellBusy as error:
        status, message = 3, error
    except KeyboardInterrupt:
        print(file=sys.stderr)  # ends the line of progress
        status, message = 130, 'interrupted; the same command starts this cell again'
    except (OSError, MemoryError) as error:  # a full disk, say: a failure, and no divergence
        status, message = 1, f'{type(error).__name__}: {error}'
    except RuntimeError as error:
        status = 1
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            message = 'out of memory; smaller --batch_size, more --gradient_accumulation_steps'
        elif type(error).__module__.startswith(('torch._dynamo', 'torch._inductor')):
            message = f'compile: 1: 0, since this machine cannot compile the model ({type(error).__name__})'
        else:
            raise
    print('qkgpt:', *str(message).split('\n'), file=sys.stderr)
    return status


if __name__ == '__main__':
    sys.stdout = sys.stdout or open(os.devnull, 'w')  # closed by the caller
    sys.stdout.reconfigure(errors='backslashreplace')  # a sample that the terminal cannot show is no failure
    sys.exit(main())
