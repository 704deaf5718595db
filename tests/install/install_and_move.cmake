# Installs into FIRST and moves the tree to PREFIX: whatever remembers its first place stops working.
file(REMOVE_RECURSE ${FIRST} ${PREFIX})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${FIRST} COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${FIRST} ${PREFIX})
