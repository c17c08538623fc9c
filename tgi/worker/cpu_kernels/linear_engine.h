// Products with packed weights on the engine that this library is compiled with (elements.h): defines `linear_of`.
#pragma once
#include "elements.h"

#if TGI_DOT_ENGINE
#include "dot_linear.h"
#else
#include "fma_linear.h"
#endif
