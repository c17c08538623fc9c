// The engine of products that this library is compiled with (elements.h): `tile_matmul` and what goes with it.
#pragma once
#include "elements.h"

#if TGI_DOT_ENGINE
#include "dot_tile.h"
#else
#include "fma_tile.h"
#endif
