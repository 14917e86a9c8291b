# Each target is one or two commands that can also be typed. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# Where `make install` puts things.
PREFIX ?= /usr/local
DESTDIR ?=
UNITDIR ?= $(PREFIX)/lib/systemd/system

CARGO ?= cargo
release := target/release
# Tests, benches and the demo run the programs that the targets build first.
built := FDMAP_PROGRAMS_ARE_BUILT=1
tier := CARGO=$(CARGO) .ci/tier

.PHONY: help
help: ## lists the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## compares pagemap and fdmap on a file that is half swapped out (root)
	@.ci/setup demo
	$(CARGO) build --release --package fdmap-server --package fdmap-client
	$(CARGO) build --release --package fdmap-tests --bin fdmap-demo --bin fdmap-test-agent --bin fdmap-cleanup
	@echo
	@$(built) $(release)/fdmap-demo $(DEMO)

.PHONY: test
test: ## all tiers: check, e2e, e2e-guest, fuzz (root, swap)
	@$(tier) check e2e e2e-guest fuzz

.PHONY: check
check: ## format, lints, unit tests (no root)
	@$(tier) check

.PHONY: e2e
e2e: ## end-to-end tests; T=NAME runs one file of tests/tests (root, swap)
	@T=$(T) $(tier) e2e

.PHONY: e2e-guest
e2e-guest: ## tests with QEMU guests, redis and stress-ng (root, swap)
	@$(tier) e2e-guest

.PHONY: fuzz
fuzz: ## each fuzz target and random operations for FDMAP_FUZZ_SECONDS, 20 by default (root, swap)
	@$(tier) fuzz

.PHONY: soak
soak: ## writes by all methods for FDMAP_SOAK_SECONDS, half an hour by default, and finds lost ones; then 1000 migrations with a fault; then 200 clients for FDMAP_LOAD_SECONDS, ten minutes by default (root, swap)
	@.ci/setup e2e
	$(CARGO) build --release --workspace --all-targets
	$(built) FDMAP_SOAK_SECONDS=$${FDMAP_SOAK_SECONDS:-1800} \
		$(CARGO) test --release --workspace --test no_lost_writes -- --nocapture --test-threads 1
	$(built) FDMAP_OPERATION_SECONDS=$${FDMAP_SOAK_SECONDS:-1800} \
		$(CARGO) test --release --workspace --test operations -- --nocapture --test-threads 1
	$(built) FDMAP_MIGRATION_FAULTS=$${FDMAP_MIGRATION_FAULTS:-1000} \
		$(CARGO) test --release --workspace --test migration -- --nocapture each_fault
	$(built) FDMAP_LOAD_SECONDS=$${FDMAP_LOAD_SECONDS:-600} FDMAP_LOAD_MAX_P99_MS=100 \
		$(CARGO) test --release --workspace --test load -- --nocapture

.PHONY: mutants
mutants: ## switches off each decision of write tracking in turn, and a test must fail; T=WORD selects (some 15 minutes)
	@CARGO=$(CARGO) .ci/setup mutants
	PATH=$(CURDIR)/target/tools/bin:$$PATH $(CARGO) mutants $(if $(T),--re '$(T)')

.PHONY: lint
lint: setup ## rustfmt and clippy
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- --deny warnings

.PHONY: bench
bench: ## measures the figures of docs/performance.md (root, swap, some minutes)
	@.ci/setup bench
	$(CARGO) build --release --workspace --bins
	$(CARGO) build --release --package fdmap-shim
	$(built) $(CARGO) bench --package fdmap-benches

.PHONY: build
build: setup ## builds fdmapd, fdmap and the shim in target/release
	$(CARGO) build --release --package fdmap-server --package fdmap-client
	$(CARGO) build --release --package fdmap-shim

.PHONY: install
install: ## installs what `make build` has built, below PREFIX
	@test -x $(release)/fdmapd -a -x $(release)/fdmap -a -r $(release)/libfdmap_shim.so || { echo "run 'make build' first" >&2; exit 1; }
	install -D -m 755 $(release)/fdmapd $(DESTDIR)$(PREFIX)/sbin/fdmapd
	install -D -m 755 $(release)/fdmap $(DESTDIR)$(PREFIX)/bin/fdmap
	install -D -m 755 $(release)/libfdmap_shim.so $(DESTDIR)$(PREFIX)/lib/libfdmap_shim.so
	install -d $(DESTDIR)$(UNITDIR)
	sed 's|@PREFIX@|$(PREFIX)|' server/fdmapd.service.in > $(DESTDIR)$(UNITDIR)/fdmapd.service
	install -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions $(DESTDIR)$(PREFIX)/share/zsh/site-functions \
		$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	$(release)/fdmap completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/fdmap
	$(release)/fdmap completions zsh > $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_fdmap
	$(release)/fdmap completions fish > $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/fdmap.fish

.PHONY: uninstall
uninstall: ## removes what `make install` installed
	rm -f $(DESTDIR)$(PREFIX)/sbin/fdmapd $(DESTDIR)$(PREFIX)/bin/fdmap $(DESTDIR)$(PREFIX)/lib/libfdmap_shim.so $(DESTDIR)$(UNITDIR)/fdmapd.service \
		$(DESTDIR)$(PREFIX)/share/bash-completion/completions/fdmap \
		$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_fdmap \
		$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/fdmap.fish

.PHONY: setup
setup: ## installs the system packages that a build needs, through apt
	@.ci/setup build
