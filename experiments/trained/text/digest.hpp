// SHA-256 (FIPS 180-4), in hexadecimal, and CRC-32 as zlib has it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lla::trained {

std::string sha256(std::string_view bytes);
uint32_t crc32(std::string_view bytes);

}  // namespace lla::trained
