# cmake --install: the library, its headers, a relocatable CMake package (find_package(lla) -> lla::lla) and lla.pc.
include(CMakePackageConfigHelpers)

install(TARGETS lla EXPORT lla-targets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/lla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
if(LLA_BUILD_APPS)
  install(TARGETS lla_cli)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/python/lla_report DESTINATION ${CMAKE_INSTALL_DATADIR}/lla/python
    FILES_MATCHING PATTERN "*.py")
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(lla_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lla)
install(EXPORT lla-targets NAMESPACE lla:: DESTINATION ${lla_package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/lla-config.cmake.in ${PROJECT_BINARY_DIR}/lla-config.cmake
  INSTALL_DESTINATION ${lla_package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/lla-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/lla-config.cmake ${PROJECT_BINARY_DIR}/lla-config-version.cmake DESTINATION ${lla_package_dir})

# lla.pc finds its prefix from its own place, so that an installed tree can be moved.
file(RELATIVE_PATH lla_pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" lla_pc_to_prefix "${lla_pc_to_prefix}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/lla.pc.in ${PROJECT_BINARY_DIR}/lla.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/lla.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
