// A number of rows as a constant, since sums stay in registers only where their number is known.
#pragma once
#include <cstdint>
#include <type_traits>

namespace tgi {

// Calls `use` with `rows`, 1 to `most`, as a std::integral_constant.
template <int64_t most, class Use>
inline void with_row_count(int64_t rows, const Use& use) {
    if constexpr (most == 1) use(std::integral_constant<int, 1>());
    else if (rows == most) use(std::integral_constant<int, most>());
    else with_row_count<most - 1>(rows, use);
}

}  // namespace tgi
