# `make demo`: set-up and the main job. `make test`: set-up, checks and tests. Nothing else is needed.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test test-ascend check engines peers clean

demo: $(VENV)/.installed
	@rm -rf demo
	$(BIN)/glm5q calibrate --recipe h200 --output demo \
		--windows 32 --sequence-length 1024 --eval-windows 8

test: check
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

check: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "glm5q needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,onnx,triton]'
	@touch $@

# The Ascend lowering, with Huawei's open compilers in environments of their own under build/ascend
# (820 MB of wheels). What runs their IR needs LLVM 19: apt-get install mlir-19-tools llvm-19 gcc.
test-ascend: $(VENV)/.tested build/ascend/torch_npu
	$(BIN)/python -m targets.ascend.environment build/ascend
	$(BIN)/python -m pytest -m 'ascend or torch_npu_wheel'

# Outside judges too large for every test run: what vLLM's and SGLang's own functions answer for our
# names (400 MB of wheels, nothing of them is imported), and msModelSlim's packers.
engines: $(VENV)/.tested
	@rm -rf build/engines
	$(BIN)/python -m pip download --quiet --no-deps --dest build/engines vllm==0.33.0 sglang==0.5.23
	$(BIN)/python -m tests.verify.resolve build/engines/vllm-*.whl build/engines/sglang-*.whl
	git diff --exit-code tests/verify/data
	$(BIN)/python -m pip install --quiet --no-deps msmodelslim==26.1.0
	$(BIN)/python -m pytest tests/formats/test_modelslim.py tests/verify/test_rules.py

# torch_npu's wheel as files for the tests of its adapters, never installed: beside torch and without
# CANN it breaks `import torch`. Where it cannot be had those tests are not run, and say so.
build/ascend/torch_npu: | $(VENV)/.tested
	-$(BIN)/python -m pip download --quiet --no-deps --dest build/ascend torch-npu==2.13.0 \
		&& $(BIN)/python -m zipfile -e build/ascend/torch_npu-*.whl build/ascend

# Public quantizers beside ours on the embedded checkpoint, each in an environment of its own under
# build/peers (6 GB). What stands there is judged again, not made again. PEERS_ARGS="--windows 86
# --sequence-length 2048 --eval-windows 48 --eval-length 2048" is the full size; "--rare 0.25 --output
# FILE" makes a quarter of each layer's experts rare, "--source DIR --output FILE" takes another
# checkpoint with the embedded one's tokenizer, --only REGEX some rows. A tool that cannot be had is
# a row too.
PEERS = llmcompressor autoround gptqmodel msmodelslim

peers: $(VENV)/.tested $(PEERS:%=build/peers/%/installed)
	$(BIN)/python -m tests.peers.driver build/peers --output reports/baselines/peers-cpu.json \
		$(PEERS_ARGS)
	$(BIN)/python -m pytest tests/peers/unpackers.py

build/peers/%/installed: tests/peers/%.txt constraints.txt
	@mkdir -p $(@D)
	$(PYTHON) -m venv $(@D)/venv
	-($(@D)/venv/bin/python -m pip install --quiet --constraint constraints.txt torch \
		&& $(@D)/venv/bin/python -m pip install --quiet --constraint constraints.txt \
			--requirement $< && touch $@) > $(@D)/install.log 2>&1

clean:
	rm -rf $(VENV) demo build dist *.egg-info
