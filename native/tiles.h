// Products with Q4_1 matrices on x86-64 with AVX2: ggml has one kernel for them, which unpacks a weight row again for every row
// that it is multiplied by. Here the weights are regrouped once, at loading, so that eight rows are computed side by side and
// what was unpacked serves several rows of the other operand.
//
// A result depends on its two rows alone: not on how many rows there are, nor on the number of threads.
#pragma once
#include "ggml.h"
#include <stdbool.h>
#include <stdint.h>

#define TSGG_TILE_ROWS 8

// Whether this build has the kernels and this processor runs them.
bool tsgg_tiles_run(void);

// Regroups a Q4_1 matrix [n_rows][columns] as the file has it; `tiles` takes as many bytes. n_rows is a multiple of
// TSGG_TILE_ROWS, columns of 32 and at most TSGG_TILE_COLUMNS.
#define TSGG_TILE_COLUMNS 65536
void tsgg_tile_q4_1(const void * matrix, void * tiles, int64_t columns, int64_t n_rows);

// The op y [rows of x][n_rows] = x [rows][columns] times the regrouped matrix, F32. `x` is a 2-D F32 tensor whose rows are contiguous.
struct ggml_tensor * tsgg_mul_tiles(struct ggml_context * ctx, struct ggml_tensor * tiles, struct ggml_tensor * x);
