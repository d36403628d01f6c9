# Checks of the native code that need more than Python; `make sanitize` and `make cuda-check`.
CSRC := paddle_privacy/kernels/csrc
NATIVE_BUILD := build/native

.PHONY: cuda-check sanitize

# Compile, link, resource report, import, and the message where there is no GPU. Needs nvcc and g++.
cuda-check: $(STAMP)
	BUILD=build/cuda $(PY) $(CSRC)/harness/check.py

# The CPU kernels under the address and undefined-behaviour sanitizers, in every instruction set that this CPU has.
sanitize:
	mkdir -p $(NATIVE_BUILD)
	g++ -std=c++20 -g -O1 -Wall -Wno-psabi -Wno-unknown-pragmas -Wno-uninitialized -fopenmp -DPP_NO_CLONES \
	  -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -ffp-contract=off \
	  -fno-math-errno -Itests/kernels/cuda_emulation -I$(CSRC) \
	  tests/kernels/sanitize/cpu_for_cuda.cc $(CSRC)/noise.cc $(CSRC)/reduce.cc -x c++ $(CSRC)/harness/harness.cu \
	  -o $(NATIVE_BUILD)/sanitize
	for isa in 0 1 2; do PP_ISA=$$isa ASAN_OPTIONS=detect_leaks=0 $(NATIVE_BUILD)/sanitize --small || exit 1; done
