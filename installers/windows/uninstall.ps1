#Requires -Version 5.1
<#
.SYNOPSIS
Removes what install.ps1 has made: the logon task, and the program inside WSL.

.DESCRIPTION
A client that runs is asked to end in order first. WSL and the distribution stay: they are not this
program's. What is not there is no error.

Everything is in functions, and the last line calls the first one: half a download does nothing.

.PARAMETER Purge
What the client keeps as well: identity, caches, preferences, logs. Nothing is left.

.PARAMETER Distribution
The WSL distribution that it was installed into. Default: WSL's own default.

.EXAMPLE
powershell -ExecutionPolicy Bypass -File uninstall.ps1 -Purge -WhatIf
Says what would be removed, and removes nothing.
#>
[CmdletBinding(SupportsShouldProcess = $true)]
param(
    [switch] $Purge,
    [string] $Distribution = ''
)

Set-StrictMode -Version 2.0
$ErrorActionPreference = 'Stop'

$TaskName = 'swarmtrain client'

function Uninstall-Swarmtrain {
    [CmdletBinding(SupportsShouldProcess = $true)]
    param(
        [switch] $Purge,
        [string] $Distribution
    )
    Uninstall-Program -Purge:$Purge -Distribution $Distribution
    Unregister-ClientTask
    if (-not $WhatIfPreference) {
        Write-Output 'Done. WSL and its distribution stay.'
    }
}

function Uninstall-Program {
    [CmdletBinding(SupportsShouldProcess = $true)]
    param([switch] $Purge, [string] $Distribution)
    if ($null -eq (Get-Command -Name 'wsl.exe' -ErrorAction SilentlyContinue)) {
        Write-Output 'This Windows has no WSL, so nothing is installed in it.'
        return
    }
    $checkout = Split-Path -Parent (Split-Path -Parent $PSScriptRoot)
    $script = Join-Path $checkout 'installers\linux\uninstall.sh'
    if (-not (Test-Path -LiteralPath $script)) {
        throw "There is no $script. Take the whole 'installers' folder, not this script alone."
    }
    $place = @()
    if ($Distribution -ne '') {
        $place = @('--distribution', $Distribution)
    }
    $inside = & wsl.exe @place --exec wslpath -a $script
    if ($LASTEXITCODE -ne 0) {
        throw 'WSL does not answer; its message above says why. Nothing was removed.'
    }
    $options = @()
    if ($Purge) {
        $options = @('--purge')
    }
    $what = 'Remove the program'
    if ($Purge) {
        $what = 'Remove the program, identity, caches, preferences and logs'
    }
    if ($PSCmdlet.ShouldProcess('the WSL distribution', $what)) {
        & wsl.exe @place --exec sh $inside @options
        if ($LASTEXITCODE -ne 0) {
            throw 'Removing it inside WSL failed; its message above says why.'
        }
    }
}

function Unregister-ClientTask {
    [CmdletBinding(SupportsShouldProcess = $true)]
    param()
    if ($null -eq (Get-ScheduledTask -TaskName $TaskName -ErrorAction SilentlyContinue)) {
        return
    }
    if ($PSCmdlet.ShouldProcess("the scheduled task '$TaskName'", 'Stop and remove')) {
        Stop-ScheduledTask -TaskName $TaskName
        Unregister-ScheduledTask -TaskName $TaskName -Confirm:$false
    }
}

Uninstall-Swarmtrain -Purge:$Purge -Distribution $Distribution
