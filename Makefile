# What people and the CI run. Each target brings the programs it needs, see scripts/bootstrap.

FEATURES := --features testing,tls,json

.PHONY: demo test test-full bench lint docs bootstrap

# A lock lost and regained, on a real etcd.
demo: bootstrap
	cargo run --quiet --example demo $(FEATURES)

# All tests, examples in the documentation included, on the installed etcd.
test: bootstrap
	scripts/test $(FEATURES)

# The same with the figures that DESIGN.md states, on the installed etcd and on etcd 3.5.
test-full: bootstrap
	ETCD_RECIPES_FULL=1 scripts/test $(FEATURES)
	etcd="$$(scripts/etcd-3.5)" && \
	ETCD_RECIPES_FULL=1 ETCD_BIN="$$etcd" ETCDCTL_BIN= scripts/test $(FEATURES)

# Speed beside raw etcd-client, in ten minutes. One scene: make bench ARGS="hand-off", a look at
# all of them: ARGS=--quick; benches/recipes.rs tells the rest.
bench: bootstrap
	cargo bench $(FEATURES) --bench recipes -- $(ARGS)

lint: bootstrap
	cargo fmt --check
	cargo clippy --all-targets $(FEATURES) -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps $(FEATURES)

docs: bootstrap
	cargo doc --no-deps $(FEATURES)

bootstrap:
	@scripts/bootstrap
