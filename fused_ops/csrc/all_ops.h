// Every op of one instruction set. LANES, REGISTERS and ENTRY are the including file's.
#include <omp.h>

#include "expert_gemm/gemm.h"
#include "lightning_indexer/indexer.h"
#include "sparse_attention/attention.h"
