# Thin: each target is one or two commands that can be typed as well. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# Where `make install` puts things.
PREFIX ?= /usr/local
DESTDIR ?=
UNITDIR ?= $(PREFIX)/lib/systemd/system

CARGO ?= cargo
release := target/release
# Programs that the tests start are built before, once, by whoever starts the tests.
built := FDMAP_PROGRAMS_ARE_BUILT=1

.PHONY: help
help: ## lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: setup ## shows a file that is half swapped out, as pagemap and as fdmap tell it (needs root)
	$(CARGO) build --release --workspace --bins
	@echo
	@$(built) $(release)/fdmap-demo $(DEMO)

.PHONY: test
test: setup lint ## lints, unit tests, end-to-end tests with real swap, fuzzing for a bounded time (needs root)
	$(CARGO) build --workspace --all-targets
	$(built) $(CARGO) test --workspace
	$(CARGO) check --package fdmap-client --no-default-features
	$(CARGO) check --package fdmap-client --no-default-features --features vm-memory
	tests/fuzz/run

.PHONY: soak
soak: setup ## writes in all ways for half an hour, FDMAP_SOAK_SECONDS for longer, and looks for lost ones (needs root)
	$(CARGO) build --release --workspace --all-targets
	$(built) FDMAP_SOAK_SECONDS=$${FDMAP_SOAK_SECONDS:-1800} \
		$(CARGO) test --release --workspace --test no_lost_writes -- --nocapture --test-threads 1

.PHONY: lint
lint: setup ## rustfmt and clippy
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- --deny warnings

.PHONY: bench
bench: setup ## the figures of docs/performance.md (needs root, some minutes)
	$(CARGO) build --release --workspace --bins
	$(CARGO) build --release --package fdmap-shim
	$(built) $(CARGO) bench --package fdmap-benches

.PHONY: build
build: setup ## fdmapd, fdmap and the shim, in target/release
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
setup: ## installs the system packages that are missing, through apt
	@.ci/setup
