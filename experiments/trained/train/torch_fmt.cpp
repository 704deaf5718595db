// torch's include folder holds an fmt of its own, which hides the system's from every file that includes torch; its
// functions are hidden inside libtorch. Here they are once more, from the same headers.
#include <fmt/format-inl.h>

template FMT_API auto fmt::detail::dragonbox::to_decimal(float x) noexcept -> dragonbox::decimal_fp<float>;
template FMT_API auto fmt::detail::dragonbox::to_decimal(double x) noexcept -> dragonbox::decimal_fp<double>;
template FMT_API fmt::locale_ref::locale_ref(const std::locale& loc);
template FMT_API auto fmt::locale_ref::get<std::locale>() const -> std::locale;
template FMT_API auto fmt::detail::thousands_sep_impl(fmt::locale_ref) -> thousands_sep_result<char>;
template FMT_API auto fmt::detail::decimal_point_impl(fmt::locale_ref) -> char;
template FMT_API void fmt::detail::buffer<char>::append(const char*, const char*);
