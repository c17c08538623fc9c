// Products with MXFP4 weights.
#include "elements.h"

#if TGI_DOT_ENGINE
#include "dot_mxfp4.h"
#endif
