#pragma once

#include "mma_sm90_gmma.hpp"
