"""One source text, run twice: with ``torch`` bound to PyTorch and to peft_core.  Values, gradients and dtypes agree.

Each SOURCE defines ``run(torch, data)``: weights and inputs come as NumPy arrays, the result is {name: Tensor}.
"""

import numpy as np
import pytest

import peft_core

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.reference

PRELUDE = """
nn, F = torch.nn, torch.nn.functional

def load(model, seed=0):
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            p.copy_(torch.tensor(draw(seed + i, *p.shape)) * 0.5)
    return model

def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}
"""

CLASSIFIER = """
class Classifier(nn.Module):
    def __init__(self, n_in, n_hidden, n_out):
        super().__init__()
        self.fc1 = nn.Linear(n_in, n_hidden)
        self.fc2 = nn.Linear(n_hidden, n_out)
        self.drop = nn.Dropout(p=0.5)

    def forward(self, x):
        return self.fc2(self.drop(F.relu(self.fc1(x))))

model = load(Classifier(6, 16, 4)).eval()
x, y = torch.tensor(draw(50, 12, 6)), torch.tensor(np.arange(12) % 4)
criterion = nn.CrossEntropyLoss()
losses = []
for step in range(10):
    logits = model(x)
    loss = criterion(logits, y)
    for p in model.parameters():
        p.grad = None
    loss.backward()
    losses.append(loss.item())
    grads = gradients(model)
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.5 * p.grad
assert losses[-1] < 0.8 * losses[0]
accuracy = (model(x).argmax(dim=1) == y).float().mean()
result = {"logits": logits, "loss": loss, "losses": torch.tensor(losses), "accuracy": accuracy, **grads,
          **model.state_dict()}
"""

CLASSIFIER_WITH_OPTIMIZER = """
model = load(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x, y = torch.tensor(draw(50, 12, 6)), torch.tensor(np.arange(12) % 4)
for step in range(10):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
result = {"loss": loss, **model.state_dict()}
"""

CNN = """
class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, kernel_size=3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, stride=1), nn.GELU(), nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.flatten = nn.Flatten()
        self.head = nn.Linear(6 * 3 * 3, 5)

    def forward(self, x):
        return self.head(self.flatten(self.features(x)))

model = load(Net())
x = torch.tensor(draw(90, 3, 1, 16, 16), requires_grad=True)
out = F.log_softmax(model(x), dim=-1)
loss = -out[torch.arange(3), torch.tensor([0, 4, 2])].mean()
loss.backward()
result = {"out": out, "loss": loss, "gx": x.grad, **gradients(model)}
"""

ATTENTION = """
class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.width = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)) == 0, persistent=False)

    def forward(self, x, padding):
        B, T, D = x.size()
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.view(B, T, self.heads, self.width) for t in (q, k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.width ** 0.5
        scores = scores.masked_fill(self.mask[:T, :T], float("-inf"))
        scores = scores.masked_fill(padding[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1)
        y = torch.einsum("bhqk,bkhd->bqhd", weights, v).contiguous().view(B, T, D)
        z = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return x + self.out(y), weights, z

model = load(SelfAttention(12, 3))
x = torch.tensor(draw(70, 2, 5, 12), requires_grad=True)
padding = torch.zeros(2, 5, dtype=torch.bool) | (torch.arange(5)[None] >= torch.tensor([[5], [3]]))
y, weights, z = model(x, padding)
((y ** 2).sum() + z.mean()).backward()
result = {"y": y, "weights": weights, "z": z, "gx": x.grad, **gradients(model)}
"""

LORA = """
class LoRALayer(nn.Module):
    def __init__(self, in_dim, out_dim, rank, alpha):
        super().__init__()
        self.A = nn.Parameter(torch.randn(in_dim, rank) / torch.sqrt(torch.tensor(rank).float()))
        self.B = nn.Parameter(torch.zeros(rank, out_dim))
        self.rank, self.alpha = rank, alpha

    def forward(self, x):
        return x @ self.A @ self.B * (self.alpha / self.rank)

class LinearWithLoRA(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear = linear
        self.lora = LoRALayer(linear.in_features, linear.out_features, rank, alpha)

    def forward(self, x):
        return self.linear(x) + self.lora(x)

model = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 3)])
for p in model.parameters():
    p.requires_grad = False
for i, layer in enumerate(model):
    model[i] = LinearWithLoRA(layer, rank=2, alpha=4)
load(model)
x = torch.tensor(draw(31, 4, 6))
h = F.silu(model[0](x))
y = model[1](h)
F.mse_loss(y, torch.zeros_like(y)).backward()
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
result = {"y": y, "trainable": torch.tensor(trainable), **gradients(model)}
"""

BRANCH = """
class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), "b": nn.Softmax(dim=1)})

    def forward(self, x):
        steps = 0
        while x.norm() < 20 and steps < 6:
            x = self.up(x) * 2 if x.sum() > 0 else self.down(x) - x
            steps += 1
        return self.blocks["a" if steps % 2 else "b"](x), steps

model = load(Branching())
found = {}
for seed in range(6):
    model.zero_grad()
    y, steps = model(torch.tensor(draw(seed + 20, 3, 4)))
    y.square().sum().backward()
    found |= {f"y{seed}": y, f"steps{seed}": torch.tensor(steps)}
    found |= {f"{name}{seed}": g for name, g in gradients(model).items() if g is not None}
result = found
"""

HALF = """
model = load(nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 4))).to(torch.bfloat16)
x = torch.tensor(draw(5, 8, 6)).bfloat16()
y = model(x)
loss = F.cross_entropy(y.float(), torch.tensor(np.arange(8) % 4))
loss.backward()
result = {"y": y, "loss": loss, "mean": y.mean(), "double": y.double().sum(dim=0), **gradients(model)}
"""

FUNCTIONS = """
x = torch.tensor(draw(1, 3, 4, 5), requires_grad=True)
w = torch.tensor(draw(2, 3, 4, 5)).abs() + 0.5
ids = torch.tensor([[0, 2], [1, 1], [3, 0]])
frequencies = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
angles = torch.outer(torch.arange(6).float(), frequencies)
values, indices = torch.max(x, dim=1)
found = {
    "max": values, "indices": indices, "amin": x.amin(dim=(0, 2)), "all": torch.max(x), "two": torch.maximum(x, w),
    "sum": x.sum(dim=-1, keepdim=True), "mean": x.mean((0, 1)), "var": x.var(dim=1), "std": x.std(1, unbiased=False),
    "norm": x.norm(dim=-1), "exp": x.exp(), "log": w.log() * x, "pow": x ** 3, "powers": w ** x, "rope": angles.cos(),
    "sqrt": torch.sqrt(x * x + 1), "clamp": x.clamp(min=-0.5, max=0.5), "where": torch.where(x > 0, x, w),
    "tril": torch.tril(x, diagonal=1), "triu": x.triu(), "cumsum": x.cumsum(dim=1), "abs": x.abs(),
    "gather": x[:, :, 0].gather(1, ids), "index": x[:, [0, 2, 2]], "mask": x[x > 0],
    "select": x.index_select(2, ids[2]), "stack": torch.stack([x, w], dim=1), "cat": torch.cat((x, w), dim=-1),
    "split": torch.split(x, 2, dim=2)[2], "chunk": x.chunk(2, dim=1)[1], "unbind": x.unbind(1)[3],
    "permute": x.permute(2, 0, 1), "flatten": x.flatten(1), "expand": x[:, :1].expand(-1, 4, 5),
    "repeat": x.repeat(2, 1, 1), "interleave": x.repeat_interleave(3, dim=1), "squeeze": x[:1].squeeze(0),
    "unsqueeze": x.unsqueeze(-1), "t": x[0].t(), "mT": x.mT, "unflatten": x.unflatten(1, (2, 2)),
    "bmm": torch.bmm(x, w.transpose(1, 2)), "matmul": torch.matmul(x, w[0].T),
    "einsum": torch.einsum("bij,bkj,i->ik", x, w, w[0, :, 0]), "softmax": torch.softmax(x, 1),
    "log_softmax": x.log_softmax(-1), "logsumexp": x.logsumexp(dim=1), "std_all": x.std(), "mod": x % 0.7,
    "round": torch.round(x), "neg": -x, "rsub": 1 - x, "rdiv": 1 / w * x, "relu": F.relu(x),
    "sigmoid": torch.sigmoid(x), "tanh": x.tanh(), "gelu": F.gelu(x, approximate="tanh"),
    "masked": x.masked_fill(w > 1, 0.0), "norm_last": F.layer_norm(x, (5,)), "mse": F.mse_loss(x, w, reduction="sum"),
    "linear": F.linear(x, w[0]),
    "conv": F.conv2d(x[None], w[:, :3, None, :2].transpose(1, 2)[:, :1].expand(-1, 3, -1, -1), padding=1, dilation=2),
    "pool": F.max_pool2d(x[None], 3, stride=1, padding=1), "add": torch.add(x, w, alpha=2),
    "log1p": torch.log1p(w) * x, "dense": F.cross_entropy(x, ids[:, :1].expand(3, 5), ignore_index=3),
}
scalars = [v.float().mean() for v in found.values() if v.requires_grad]
total = torch.stack(scalars).sum()
total.backward()
plain = {
    "argmax": x.argmax(dim=1), "argmax_all": x.argmax(), "any": (x > 2).any(dim=0), "every": torch.all(x < 9),
    "not": ~(x > 0), "and": (x > 0) & (w > 1), "or": torch.logical_or(x > 0, w > 1), "ones": torch.ones(2, 3),
    "eye": torch.eye(3), "full": torch.full((2, 2), 7), "halves": torch.full((2,), 0.5),
    "range": torch.arange(1, 10, 3), "floats": torch.arange(0.0, 1.0, 0.25), "line": torch.linspace(0, 1, 5),
    "like": torch.zeros_like(ids), "ones_like": torch.ones_like(x), "one_hot": F.one_hot(ids, num_classes=4),
    "new": x.new_zeros(2, 3), "long": x.long(), "int": torch.tensor([1, 2]), "bool": torch.tensor([True, False]),
    "sum": (x > 0).sum(), "half": w.half(), "floor": w // 0.4,
    "equal": torch.tensor([torch.equal(x, x), torch.allclose(x, w)]), "count": torch.tensor(x.numel()),
    "list": torch.tensor(x.tolist()), "scalar": torch.tensor(3.5), "div": torch.tensor([3, 4]) / 2,
    "stride": torch.tensor(x.stride()), "shape": torch.tensor(tuple(x.size())),
}
text = torch.tensor(len(f"{total:.3f}"))
result = {**found, **{"p_" + k: v for k, v in plain.items()}, "gx": x.grad, "text": text}
"""

ORDER_AND_KINDS = """
x = torch.tensor(draw(3, 4, 6), requires_grad=True)
values, indices = torch.topk(x, k=2, dim=-1)
ordered = x.sort(dim=0, descending=True)
smallest = x.topk(3, dim=0, largest=False)
(values.sum() * 2 + (ordered.values[0] * ordered.values[1]).sum() + smallest.values.sum()).backward()
scale, count, half = torch.tensor(0.5), torch.tensor(3), x.detach().half()
where = torch.where(x > 1)
assert not (x == None) and x != None and x is not None
x2 = x.detach()
x2.requires_grad_(True)
result = {
    "values": values, "indices": indices, "ordered": ordered.values, "places": ordered.indices, "gx": x.grad,
    "small": smallest.indices, "argsort": x.argsort(dim=1), "half_scaled": half * scale, "scaled_half": scale * half,
    "half_counted": half / count, "power": half ** torch.tensor(2.0), "sum": half.sum() * scale,
    "counted": count * scale, "long": torch.arange(3) * scale,
    "longer": torch.arange(3) + count, "bool": (x > 0) * count, "rows": where[0],
    "columns": where[1], "nonzero": (x > 1).nonzero(), "two": 2 ** x, "exp": x.exp(), "tensor_power": x.abs() ** x,
    "floordiv": 7 // count, "mod": 7 % count, "flip": x.flip(0), "view": x.mT.contiguous().view(3, 8), "mv": x.mv(x[0]),
    "size": torch.tensor(x.size()), "select": torch.where(x > 0, half, scale), "deterministic": torch.multinomial(
        torch.tensor([[0.0, 3.0, 0.0], [1.0, 0.0, 0.0]]), num_samples=1),
}
"""

EMBEDDING = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 6, padding_idx=2)
        self.places = nn.Embedding(num_embeddings=5, embedding_dim=6)
        self.norm = nn.LayerNorm([6], eps=1e-6)
        self.register_buffer("steps", torch.arange(5))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places(self.steps[:ids.shape[1]])
        return self.head(self.norm(x))

first = load(Words())
model = Words()
print(model.load_state_dict(first.state_dict()))
ids = torch.tensor([[1, 2, 6, 0], [2, 2, 3, 5]])
logits = model(ids)
loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].reshape(-1), ignore_index=2, reduction="sum")
loss.backward()
assert set(model.state_dict()) == {"words.weight", "places.weight", "norm.weight", "norm.bias", "steps", "head.weight"}
assert len(list(model.parameters())) == 4 and not model.train(False).training and model.train().head.training
result = {"logits": logits, "loss": loss, **gradients(model), **dict(model.named_buffers())}
"""

MNIST = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 5)
        self.conv2 = nn.Conv2d(4, 8, kernel_size=3, bias=False)
        self.drop = nn.Dropout(0.25)
        self.fc1, self.fc2 = nn.Linear(8 * 4 * 4, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = self.conv2(x).relu()
        x = x.view(-1, 8 * 4 * 4)
        return F.log_softmax(self.fc2(self.drop(F.relu(self.fc1(x)))), dim=1)

model = load(Net())
model.eval()
x, y = torch.tensor(draw(8, 3, 1, 16, 16)), torch.tensor([3, 1, 9])
conv = model.conv2(model.conv1(x))
out = model(x[:, :, :16, :16])
loss = F.nll_loss(out, y)
loss.backward()
pred = out.argmax(dim=1, keepdim=True)
correct = pred.eq(y.view_as(pred)).sum().item()
result = {"out": out, "loss": loss, "pred": pred, "correct": torch.tensor(correct), "conv": conv, **gradients(model),
          "one": model.conv1(x[0]), "flat": conv.view(3, -1)}
"""

ACCUMULATION = """
model = load(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = [(torch.tensor(draw(i, 4, 6)), torch.tensor(np.arange(4) % 3)) for i in range(12)]
steps, running, history = 4, 0.0, []
optimizer.zero_grad()
for i, (x, y) in enumerate(batches):
    loss = F.cross_entropy(model(x), y) / steps
    loss.backward()
    running += loss.item()
    if (i + 1) % steps == 0:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        history.append(running)
        running = 0.0
assert all(p.grad is None for p in model.parameters())
result = {"history": torch.tensor(history), "norm": torch.tensor(float(norm)), **model.state_dict()}
"""


SOURCES = {name.lower(): source for name, source in list(globals().items()) if name.isupper() and name != "PRELUDE"}


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def execute(source, module):
    scope = {"torch": module, "np": np, "draw": draw}
    exec(compile(PRELUDE + source, "<source>", "exec"), scope)
    return scope["result"]


def array_of(t):
    t = t.detach()
    return t.float().numpy().astype(np.float64) if str(t.dtype).endswith("bfloat16") else np.asarray(t.numpy())


@pytest.mark.parametrize("name", SOURCES)
def test_one_text_gives_the_same_with_both(name):
    theirs, ours = execute(SOURCES[name], torch), execute(SOURCES[name], peft_core)
    assert list(theirs) == list(ours)
    wrong = []
    for key, t in theirs.items():
        o = ours[key]
        if (t is None) != (o is None):
            wrong.append(f"{key}: {o}, torch has {t}")
        if t is None or o is None:
            continue
        if str(t.dtype).removeprefix("torch.") != str(o.dtype) or tuple(t.shape) != o.shape:
            wrong.append(f"{key}: {o.dtype} {o.shape}, torch has {t.dtype} {tuple(t.shape)}")
            continue
        a, b = array_of(o).astype(np.float64), array_of(t).astype(np.float64)
        bound = 2e-2 if name == "half" else 1e-5
        if not np.linalg.norm(a - b) <= bound * max(np.linalg.norm(b), 1e-3):
            wrong.append(f"{key}: differs by {np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30):.2e}")
    assert not wrong, "\n".join(wrong)


def test_the_comparison_can_fail():
    source = SOURCES["lora"].replace("self.alpha / self.rank", "self.alpha / self.rank * (1 + 1e-4 * ours)")
    ours = execute("ours = 1\n" + source, peft_core)
    theirs = execute("ours = 0\n" + source, torch)
    assert np.linalg.norm(array_of(ours["y"]) - array_of(theirs["y"])) > 1e-5 * np.linalg.norm(array_of(theirs["y"]))
